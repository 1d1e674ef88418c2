"""The Triton backend of experts: kernels, and the host code that launches them."""
