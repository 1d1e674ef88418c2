"""Host code of ``few_sm90.cu``: both products of few routes, which are not sorted."""

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

SIGNATURE = "T(PPPPiiiii)"
"""The tensor map of the weights, then ``struct Args``."""
ROWS, MOST, WARP = 16, 16, 32
"""Rows of weights of a unit, routes of a segment, and threads of a warp."""
EXPERTS, ROUTES = 512, 2048
"""Largest numbers of experts and of routes."""
STATIC = 10 * 1024
"""Bytes of shared memory for barriers and lists, at the most."""


class Ring(NamedTuple):
    """How a block loads weights: its warps, stages of each, and boxes of 64 terms of K in a stage."""

    warps: int
    stages: int
    boxes: int

    @property
    def size(self) -> int:
        """Bytes of shared memory, with room for alignment."""
        return 1024 + self.warps * self.stages * self.boxes * ROWS * SWIZZLE


FIRST, SECOND = Ring(8, 2, 4), Ring(8, 3, 4)


def reads(inputs: Inputs) -> bool:
    """Say whether the kernel computes both products of a call."""
    gate_up, down = inputs.gate_up, inputs.down
    count, width, inner = down.shape
    routes = inputs.ids.numel()
    if inputs.interleaved or count > EXPERTS or routes > ROUTES or not (fits(gate_up) and fits(down)):
        return False
    return all(ring.size + _rows(routes) * _row(k) + STATIC <= SHARED for ring, k in ((FIRST, width), (SECOND, inner)))


def _rows(routes: int) -> int:
    """Return the rows of routes that are held in shared memory."""
    return MOST // 2 if routes <= MOST // 2 else MOST


def _row(k: int) -> int:
    """Return the bytes of one of them, with padding against bank conflicts."""
    return -(-k // STEP) * STEP * 2 + ALIGNED


def program(dtype: torch.dtype, ring: Ring, *, is_first: bool, wide_ids: bool, activation: int = 0) -> Program:
    """Return the kernel; ``is_first``: gate and up of tokens, else the second product of routes."""
    numbers = {
        "DTYPE": CODES[dtype],
        "PAIR": int(is_first),
        "ACTIVATION": activation,
        "GATHERED": int(is_first),
        "WIDE_IDS": int(wide_ids),
        "WARPS": ring.warps,
        "STAGES": ring.stages,
        "BOXES": ring.boxes,
    }
    return Program(products.PACKAGE, "few_sm90.cu", "sm_90a", tuple(numbers.items()))


class _Few:
    """A launch of the kernel, prepared for weights like ``b``."""

    def __init__(self, b: torch.Tensor, ids: torch.Tensor, ring: Ring, is_first: bool, activation: int = 0) -> None:
        count, n, k = b.shape
        parts, routes = 2 if is_first else 1, ids.numel()
        self._shape = (routes, n // parts)
        self._weights = Weights(b, ROWS, parts)
        made = program(b.dtype, ring, is_first=is_first, wide_ids=ids.dtype == torch.int64, activation=activation)
        self._kernel = kernel(made, "few", SIGNATURE, b.device)
        self._sizes = (processors(b.get_device()), 1, 1), ring.warps * WARP, ring.size + _rows(routes) * _row(k)
        self._numbers = routes, ids.shape[1], count, n // parts, k

    def launch(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
        """Return ``[T k, N]``; the launch may start early, because the kernel waits itself."""
        out, a = a.new_empty(self._shape), readable(a, a.data_ptr() % ALIGNED == 0)
        pointers = [0 if x is None else x.data_ptr() for x in (a, bias, ids, out)]
        if out.numel():
            self._kernel.start(*self._sizes, True, (self._weights.map_of(b), *pointers, *self._numbers))
        return out


class GateUp(_Few):
    """Return None and ``h[route, F]`` of both halves of ``b[E, 2F, D]``; unlike the Triton backend's, of ids."""

    def __init__(self, ids: torch.Tensor, b: torch.Tensor, *arguments: Any) -> None:
        *_, activation, _, _ = arguments
        super().__init__(b, ids, FIRST, True, activation)

    def __call__(
        self, hidden: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor, _: None
    ) -> tuple[None, torch.Tensor]:
        """Launch it."""
        return None, self.launch(hidden, b, bias, ids)


class Product(_Few):
    """Return ``h[route] @ b[e]^T + bias[e]`` of all routes; unlike the Triton backend's, of ids."""

    def __init__(self, ids: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> None:
        super().__init__(b, ids, SECOND, False)

    def __call__(
        self, h: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor, _: None
    ) -> torch.Tensor:
        """Launch it."""
        return self.launch(h, b, bias, ids)


def programs(dtypes: Iterable[torch.dtype]) -> Iterator[Program]:
    """Yield the kernels for these dtypes of weights."""
    for dtype in dtypes:
        for wide_ids in (False, True):
            yield program(dtype, SECOND, is_first=False, wide_ids=wide_ids)
            for activation in range(len(NAMES)):
                yield program(dtype, FIRST, is_first=True, wide_ids=wide_ids, activation=activation)
