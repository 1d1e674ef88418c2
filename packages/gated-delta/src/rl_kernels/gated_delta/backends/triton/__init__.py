"""The Triton backend of gated_delta_rule: kernels, and the host code that launches them."""
