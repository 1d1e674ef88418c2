"""What checks, tests and benchmarks know of linear_logp; nothing at run time imports it."""
