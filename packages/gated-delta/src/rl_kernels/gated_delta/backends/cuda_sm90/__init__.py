"""Kernels of gated_delta_rule in CUDA C++ for Hopper."""
