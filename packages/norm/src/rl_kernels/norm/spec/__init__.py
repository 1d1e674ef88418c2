"""Cases and benchmarks of rms_norm and layer_norm, for checks and tests; never imported at run time."""
