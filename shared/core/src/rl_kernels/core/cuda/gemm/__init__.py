"""The canonical chain on Hopper: a matrix product in CUDA C++ whose order of sums depends on K alone.

``gemm_sm90.cu`` states the order, which ``triton_lib/gemm_kernels.py`` has too.
"""
