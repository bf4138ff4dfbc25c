"""One outside thing each: git, goldens on disk, the journal, processes."""
