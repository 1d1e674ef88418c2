"""The Triton backend of causal_conv1d: kernels, and the host code that launches them."""
