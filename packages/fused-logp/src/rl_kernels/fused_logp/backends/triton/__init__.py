"""The Triton backend of fused_logp: kernels and the host code that launches them."""
