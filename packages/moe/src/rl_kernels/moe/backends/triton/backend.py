"""The backend ``triton`` of experts and route, for every GPU; the kernels are in ``products`` and ``rows``."""

from __future__ import annotations

import torch

from rl_kernels.core.triton_lib.gemm import Product as MatrixProduct
from rl_kernels.moe.backends.triton import routing
from rl_kernels.moe.backends.triton.grouped import GateUp, Product, WeightGradient
from rl_kernels.moe.backends.triton.launches import Kit, raw_ops
from rl_kernels.moe.backends.triton.schedule import schedules_for

__all__ = [
    "backward",
    "backward_into",
    "forward",
    "forward_kept",
    "route_backward",
    "route_backward_into",
    "route_choose",
    "route_logits",
]


def kit_of(routes: int, experts: int, dtype: torch.dtype, device: torch.device) -> Kit:
    """Return the products of a call."""
    return Kit(schedules_for(routes, experts, dtype, device), GateUp, Product, WeightGradient)


forward, forward_kept, backward, backward_into = raw_ops(kit_of)
route_logits, route_backward, route_backward_into = routing.raw_ops(MatrixProduct)
route_choose = routing.route_choose
