"""Batch-invariant matrix product and linear layer: no row's bits depend on the batch."""

from rl_kernels.det_gemm.api import det_gemm, det_gemm_dw, det_linear
from rl_kernels.det_gemm.module import DetLinear
from rl_kernels.det_gemm.parallel import column_parallel_linear, row_parallel_linear

__all__ = [
    "DetLinear",
    "column_parallel_linear",
    "det_gemm",
    "det_gemm_dw",
    "det_linear",
    "row_parallel_linear",
]
