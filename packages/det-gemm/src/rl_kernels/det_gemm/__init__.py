"""Matrix product and linear layer whose bits do not depend on the batch, and models made of them."""

from rl_kernels.det_gemm.api import det_gemm, det_gemm_dw, det_linear
from rl_kernels.det_gemm.canary import CanaryMismatch
from rl_kernels.det_gemm.models.audit import AuditResult, Finding, audit
from rl_kernels.det_gemm.models.invariant import Invariance, invariant
from rl_kernels.det_gemm.module import DetLinear

__all__ = [
    "AuditResult",
    "CanaryMismatch",
    "DetLinear",
    "Finding",
    "Invariance",
    "audit",
    "det_gemm",
    "det_gemm_dw",
    "det_linear",
    "invariant",
]
