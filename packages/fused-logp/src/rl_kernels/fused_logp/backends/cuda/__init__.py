"""The CUDA C++ backends of fused_logp: kernel sources and the host code that launches them."""
