"""What checks, tests and benchmarks know of rms_norm and layer_norm; nothing at run time imports it."""
