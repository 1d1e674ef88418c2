"""The CUDA C++ backends of fused_logp: sources, and the host code that launches them."""
