"""The backend ``triton`` of experts and route, for every GPU; the kernels are in ``triton_lib``."""

from __future__ import annotations

from rl_kernels.core.triton_lib.gemm import Product as MatrixProduct
from rl_kernels.moe.triton_lib import routing
from rl_kernels.moe.triton_lib.grouped import kit_of
from rl_kernels.moe.triton_lib.launches import combine_routes, raw_ops

__all__ = [
    "backward",
    "backward_into",
    "combine",
    "forward",
    "forward_kept",
    "route_backward",
    "route_backward_into",
    "route_choose",
    "route_logits",
]


forward, forward_kept, backward, backward_into = raw_ops(kit_of)
combine = combine_routes
route_logits, route_backward, route_backward_into = routing.raw_ops(MatrixProduct)
route_choose = routing.route_choose
