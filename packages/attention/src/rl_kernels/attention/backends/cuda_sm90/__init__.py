"""The CUDA C++ backend of det_attention for Hopper: kernel sources and the host code that launches them."""
