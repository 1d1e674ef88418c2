"""Host code of ``token_sm90.cu``: both products of one token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from rl_kernels.core.constants import STEP
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.gpu import processors
from rl_kernels.core.layout import ALIGNED, readable
from rl_kernels.moe.activations import NAMES
from rl_kernels.moe.backends.cuda_sm90 import products
from rl_kernels.moe.backends.cuda_sm90.products import CODES, SHARED, SWIZZLE, Weights, fits
from rl_kernels.moe.inputs import Inputs

SIGNATURE = "T(PPPPiiii)"
"""The tensor map of the weights, then ``struct Args``."""
ROWS, MOST, WARP = 16, 8, 32
"""Rows of weights of a unit, the most routes, and threads of a warp."""
STATIC = 1024
"""Bytes of shared memory for barriers and the routes, at the most."""


class Ring(NamedTuple):
    """How a block loads weights: its warps, stages of each, and boxes of 64 terms of K in a stage."""

    warps: int
    stages: int
    boxes: int

    @property
    def size(self) -> int:
        """Bytes of shared memory, with room for alignment."""
        return 1024 + self.warps * self.stages * self.boxes * ROWS * SWIZZLE


RING = Ring(8, 2, 4)


def reads(inputs: Inputs) -> bool:
    """Say whether the kernel computes both products of a call."""
    longest = max(inputs.down.shape[1:])
    if len(inputs.ids) != 1 or inputs.ids.numel() > MOST or inputs.interleaved:
        return False
    fit = RING.size + MOST * _row(longest) + STATIC <= SHARED
    return fit and fits(inputs.gate_up) and fits(inputs.down)


def _row(k: int) -> int:
    """Return the bytes of a row of K numbers in shared memory, padded against bank conflicts."""
    return -(-k // STEP) * STEP * 2 + ALIGNED


def program(dtype: torch.dtype, *, is_first: bool, wide_ids: bool, activation: int = 0) -> Program:
    """Return the kernel; ``is_first``: gate and up of tokens, else the second product of routes."""
    numbers = {
        "DTYPE": CODES[dtype],
        "PAIR": int(is_first),
        "ACTIVATION": activation,
        "WIDE_IDS": int(wide_ids),
        "WARPS": RING.warps,
        "STAGES": RING.stages,
        "BOXES": RING.boxes,
    }
    return Program(products.PACKAGE, "token_sm90.cu", "sm_90a", tuple(numbers.items()))


class _Token:
    """A launch of the kernel, prepared for weights like ``b``."""

    def __init__(self, b: torch.Tensor, ids: torch.Tensor, is_first: bool, activation: int = 0) -> None:
        count, n, k = b.shape
        parts, routes = 2 if is_first else 1, ids.numel()
        self._shape = (routes, n // parts)
        self._weights = Weights(b, ROWS, parts)
        made = program(b.dtype, is_first=is_first, wide_ids=ids.dtype == torch.int64, activation=activation)
        self._kernel = kernel(made, "token", SIGNATURE, b.device)
        self._sizes = (processors(b.get_device()), 1, 1), RING.warps * WARP, RING.size + MOST * _row(k)
        self._numbers = routes, count, n // parts, k

    def launch(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
        """Return ``[T k, N]``; the launch may start early, because the kernel waits itself."""
        out, a = a.new_empty(self._shape), readable(a, a.data_ptr() % ALIGNED == 0)
        pointers = [0 if x is None else x.data_ptr() for x in (a, bias, ids, out)]
        if out.numel():
            self._kernel.start(*self._sizes, True, (self._weights.map_of(b), *pointers, *self._numbers))
        return out


class GateUp(_Token):
    """Return None and ``h[route, F]`` of both halves of ``b[E, 2F, D]``; unlike the Triton backend's, of ids."""

    def __init__(self, ids: torch.Tensor, b: torch.Tensor, *arguments: Any) -> None:
        *_, activation, _, _ = arguments
        super().__init__(b, ids, True, activation)

    def __call__(
        self, hidden: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor, _: None
    ) -> tuple[None, torch.Tensor]:
        """Launch it."""
        return None, self.launch(hidden, b, bias, ids)


class Product(_Token):
    """Return ``h[route] @ b[e]^T + bias[e]`` of all routes; unlike the Triton backend's, of ids."""

    def __init__(self, ids: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> None:
        super().__init__(b, ids, False)

    def __call__(
        self, h: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor, _: None
    ) -> torch.Tensor:
        """Launch it."""
        return self.launch(h, b, bias, ids)


def programs(dtypes: Iterable[torch.dtype]) -> Iterator[Program]:
    """Yield the kernels for these dtypes of weights."""
    for dtype in dtypes:
        for wide_ids in (False, True):
            yield program(dtype, is_first=False, wide_ids=wide_ids)
            for activation in range(len(NAMES)):
                yield program(dtype, is_first=True, wide_ids=wide_ids, activation=activation)
