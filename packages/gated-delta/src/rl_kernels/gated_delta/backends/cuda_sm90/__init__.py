"""CUDA C++ kernels of gated_delta_rule for Hopper (sm_90a)."""
