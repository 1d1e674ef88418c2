"""Batch-invariant matrix product and linear layer: no row's bits depend on the batch."""

from rl_kernels.det_gemm.api import det_gemm, det_gemm_dw, det_linear
from rl_kernels.det_gemm.canary import CanaryMismatch
from rl_kernels.det_gemm.module import DetLinear

__all__ = ["CanaryMismatch", "DetLinear", "det_gemm", "det_gemm_dw", "det_linear"]
