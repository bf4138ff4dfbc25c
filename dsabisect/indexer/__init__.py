"""The domain, pure: cases, inputs, the fp64 oracle, the comparator and its tolerances."""
