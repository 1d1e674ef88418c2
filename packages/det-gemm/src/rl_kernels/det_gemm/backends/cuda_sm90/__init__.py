"""The CUDA C++ backend of det_gemm for Hopper: sources, and the host code that launches them."""
