"""The backend ``cuda-sm90`` of det_gemm: the canonical chain by TMA and WGMMA; the tile depends on the shape."""

from __future__ import annotations

from rl_kernels.core.cuda.gemm.ahead import programs_of, segmented_of
from rl_kernels.core.cuda.gemm.matmul import Product
from rl_kernels.core.cuda.program import Program
from rl_kernels.det_gemm.prepared import raw_ops

forward, segmented, segmented_into, weight_gradient, weight_gradient_into, joined_into = raw_ops(Product)


def programs(arch: str) -> list[Program]:
    """Return the programs to compile for a target: all of them for ``sm_90a``, none for others."""
    return programs_of(arch) + segmented_of(arch)
