"""The Triton backend of linear_logp: kernels and the host code that launches them."""
