"""The backend ``cuda-sm90`` of experts and route: products of routes by TMA and WGMMA, other steps in Triton."""

from __future__ import annotations

from functools import partial

import torch

from rl_kernels.core.cuda.gemm.ahead import programs_of
from rl_kernels.core.cuda.gemm.matmul import Product as MatrixProduct
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.triton_lib.schedule import Schedule
from rl_kernels.moe.activations import NAMES
from rl_kernels.moe.backends.cuda_sm90 import gradient, token
from rl_kernels.moe.backends.cuda_sm90.gradient import WeightGradient
from rl_kernels.moe.backends.cuda_sm90.products import CODES, HALVES, NEIGHBORS, ROWS, Form, GateUp, Product
from rl_kernels.moe.inputs import Inputs
from rl_kernels.moe.triton_lib import grouped, routing
from rl_kernels.moe.triton_lib.launches import Kit, combine_routes, raw_ops
from rl_kernels.moe.triton_lib.schedule import Schedules

__all__ = [
    "backward",
    "backward_into",
    "combine",
    "forward",
    "forward_kept",
    "programs",
    "route_backward",
    "route_backward_into",
    "route_choose",
    "route_logits",
]

FEW = 24
"""Largest mean number of an expert's routes for which products are bound by loads, and Triton's tiles are lower."""
PAIR, WHOLE = Schedule(ROWS, 128, 64, 12, 4), Schedule(ROWS, 256, 64, 12, 4)
"""Tiles of the first product, whose columns are those of the activation, and of all others.

On an H200 tiles of 64 routes whose consumers take turns were slower at all of four models' widths. So were weights as M
and up to 256 routes as N, in steps of 32: 354 beside 428 TFLOP/s at the widths of Qwen3.5-35B-A3B and 8,192 tokens, and
slower even where no row was padding, which alone takes the present tiles to 512.
"""


def kit_of(inputs: Inputs, is_sorted: bool) -> Kit:
    """Return the products of a call."""
    routes, experts = inputs.ids.numel(), inputs.gate_up.shape[0]
    if routes <= FEW * experts:
        kit = grouped.kit_of(inputs, is_sorted)
        if is_sorted or not token.reads(inputs):
            return kit
        first, second = (partial(one, inputs.ids) for one in (token.GateUp, token.Product))
        return kit._replace(gate_up=first, product=second, is_sorted=False)
    return Kit(Schedules(PAIR, WHOLE, WHOLE, WHOLE), GateUp, Product, WeightGradient)


forward, forward_kept, backward, backward_into = raw_ops(kit_of)
combine = combine_routes
route_logits, route_backward, route_backward_into = routing.raw_ops(MatrixProduct)
route_choose = routing.route_choose


def programs(arch: str) -> list[Program]:
    """Return the programs to compile for a target: all of them for ``sm_90a``, none for others."""
    # Those of core are for route.
    halves = [dtype for dtype in CODES if dtype != torch.float32] if arch == "sm_90a" else []
    flags = [(left, continues) for left in (False, True) for continues in (False, True)]
    return [
        *programs_of(arch),
        *(form.program for dtype in halves for form in _forms(dtype)),
        *token.programs(halves),
        *(gradient.program(dtype, left=left, continues=continues) for dtype in halves for left, continues in flags),
    ]


def _forms(dtype: torch.dtype) -> list[Form]:
    """Return the kernels of the products for weights that TMA reads."""
    of_routes = [
        partial(Form, dtype, dtype, gathered=False, scattered=True),
        partial(Form, dtype, torch.float32, gathered=True, scattered=False),
        partial(Form, dtype, dtype, gathered=True, scattered=False),
        *(
            partial(Form, dtype, dtype, gathered=True, scattered=False, pair=pair, activation=activation, keeps=keeps)
            for pair in (HALVES, NEIGHBORS)
            for activation in range(len(NAMES))
            for keeps in (False, True)
        ),
    ]
    return [form(columns=WHOLE.columns, b_major=major) for form in of_routes for major in (0, 1)]
