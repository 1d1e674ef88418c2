"""The canonical chain on Hopper: a matrix product in CUDA C++ whose order of sums depends on K alone.

``gemm_sm90.cu`` states the order, which is that of ``triton_lib/gemm.py``.
"""
