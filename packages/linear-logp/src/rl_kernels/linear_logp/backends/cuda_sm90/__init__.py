"""The CUDA C++ backend of linear_logp for Hopper: kernel sources and the host code that launches them."""
