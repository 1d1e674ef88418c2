"""det_gemm in Triton: the canonical chain; the tile depends on the shape."""

from __future__ import annotations

from rl_kernels.core.triton_lib.gemm import Product
from rl_kernels.det_gemm.prepared import raw_ops

forward, segmented, segmented_into, weight_gradient, weight_gradient_into, joined_into = raw_ops(Product)
