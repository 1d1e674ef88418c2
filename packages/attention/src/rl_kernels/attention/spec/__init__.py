"""What checks, tests and benchmarks know of det_attention; nothing at run time imports it."""
