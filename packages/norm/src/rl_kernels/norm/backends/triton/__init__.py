"""The Triton backend of rms_norm: kernels, and the host code that launches them."""
