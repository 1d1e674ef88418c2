"""Cases and benchmarks of det_gemm, for checks and tests; never imported at run time."""
