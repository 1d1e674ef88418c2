"""What checks, tests and benchmarks know of det_gemm; nothing at run time imports it."""
