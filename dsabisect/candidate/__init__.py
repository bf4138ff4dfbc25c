"""Everything here runs INSIDE the candidate's process. It imports nothing of ours outside this package."""
