"""Cases and benchmarks of det_attention, for checks and tests; never imported at run time."""
