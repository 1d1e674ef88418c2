"""What checks, tests and benchmarks know of fused_logp; nothing at run time imports it."""
