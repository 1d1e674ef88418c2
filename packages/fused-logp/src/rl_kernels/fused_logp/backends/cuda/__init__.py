"""The CUDA C++ backend of fused_logp: kernel sources and the host code that launches them."""
