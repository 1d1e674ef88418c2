"""What checks, tests and benchmarks know of scaled_add; nothing at run time imports it."""
