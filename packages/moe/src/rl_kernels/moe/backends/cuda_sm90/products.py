"""Host code of ``experts_sm90.cu``: the products of routes, prepared for weights of one layout."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.signature import MAP_SIZE
from rl_kernels.core.cuda.tensor_map import TensorMap, tensor_map
from rl_kernels.core.gpu import processors
from rl_kernels.core.layout import ALIGNED, readable
from rl_kernels.core.triton_lib.schedule import Schedule
from rl_kernels.moe.triton_lib.sorting import tile_count

PACKAGE = "rl_kernels.moe.backends.cuda_sm90"
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Values of the kernel's DTYPE and OUT."""
SIGNATURE = "TT(PPPPPPiiiii)"
"""Tensor maps of both operands, then ``struct Args``."""
NO_MAP = bytes(MAP_SIZE)
ALONE, HALVES, NEIGHBORS = 0, 1, 2
"""Values of the kernel's PAIR."""
BOX, ROWS, SWIZZLE = 64, 128, 128
"""Terms of K in a stage, routes of a tile, bytes of a row of a box."""
THREADS = 384
"""Threads of a block."""
SHARED = 227 * 1024 - 1024
"""Bytes of dynamic shared memory that a block may have, less barriers."""
MOST_MAPS = 1024
"""Number of tensor maps of an operand at which they are forgotten."""


class Form(NamedTuple):
    """The constants of a kernel; their meanings are in ``experts_sm90.cu``."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    columns: int
    b_major: int
    gathered: bool
    scattered: bool
    pair: int = ALONE
    activation: int = 0
    keeps: bool = False

    @property
    def stages(self) -> int:
        """Number of stages: as many as fit."""
        return (SHARED - self._fixed) // self._stage

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return self._fixed + self.stages * self._stage

    @property
    def _stage(self) -> int:
        return (ROWS + self.columns) * SWIZZLE

    @property
    def _fixed(self) -> int:
        """Bytes of two boxes for each 64 rows, and for the alignment of the stages."""
        return 2 * ROWS * SWIZZLE + 1024

    @property
    def program(self) -> Program:
        """The kernel."""
        numbers = {
            "DTYPE": CODES[self.dtype],
            "OUT": CODES[self.out_dtype],
            "TILE_N": self.columns,
            "STAGES": self.stages,
            "B_MAJOR": self.b_major,
            "GATHERED": int(self.gathered),
            "SCATTERED": int(self.scattered),
            "PAIR": self.pair,
            "ACTIVATION": self.activation,
            "KEEPS": int(self.keeps),
        }
        return Program(PACKAGE, "experts_sm90.cu", "sm_90a", tuple(numbers.items()))


class Weights:
    """How TMA reads ``b[E, N, K]``: a map of four dims with N cut into ``parts``; other layouts are copied.

    Attributes:
        major: the kernel's B_MAJOR.
    """

    def __init__(self, b: torch.Tensor, columns: int, parts: int) -> None:
        count, n, k = b.shape
        self._fits = fits(b) or fits(b.mT)
        self.major = int(self._fits and not fits(b))
        expert, row, column = b.stride() if self._fits else (n * k, k, 1)
        if self.major:
            self._shape, self._strides = (count, parts, k, n // parts), (expert, n // parts, column, 1)
            self._box: tuple[int, ...] = (1, 1, BOX, BOX)
        else:
            self._shape, self._strides = (count, parts, n // parts, k), (expert, n // parts * row, row, 1)
            self._box = (1, parts, columns // parts, BOX)
        self._maps: dict[int, TensorMap] = {}

    def readable(self, b: torch.Tensor) -> torch.Tensor:
        """Return b, or its copy where TMA cannot read it."""
        return readable(b, self._fits)

    def map_of(self, b: torch.Tensor) -> TensorMap:
        """Return the tensor map of what ``readable`` returned."""
        address = b.data_ptr()
        known = self._maps.get(address)
        if known is None:
            if len(self._maps) >= MOST_MAPS:
                self._maps.clear()
            view = b.as_strided(self._shape, self._strides)
            known = self._maps[address] = tensor_map(view, self._box, swizzle=SWIZZLE)
        return known


def fits(b: torch.Tensor) -> bool:
    """Say whether TMA can read ``b[E, N, K]`` with K contiguous."""
    per = ALIGNED // b.element_size()
    expert, row, column = b.stride()
    dense = column == 1 and row >= b.shape[2] and expert >= b.shape[1] * b.shape[2]
    return dense and not (row % per or expert % per or b.data_ptr() % ALIGNED)


class Product:
    """Return ``a[route] @ b[e]^T + bias[e]`` of all routes; the arguments are those of the Triton backend's class."""

    def __init__(
        self,
        b: torch.Tensor,
        routes: int,
        slots: int,
        cut: Schedule,
        *,
        gathered: bool = False,
        scattered: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        dtype = out_dtype or b.dtype
        self._weights = Weights(b, cut.columns, 1)
        form = Form(b.dtype, dtype, cut.columns, self._weights.major, gathered, scattered)
        self._launch = _Launch(form, b, routes, slots)

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        routes: torch.Tensor,
        tiles: torch.Tensor,
    ) -> torch.Tensor:
        """Launch it, and return ``[T k, N]``: ``a[M, K]`` and ``bias[E, N]`` are contiguous, in the dtype of b."""
        out = a.new_empty(self._launch.shape, dtype=self._launch.form.out_dtype)
        if out.numel():
            self._launch(a, self._weights, b, bias, out, None, routes, tiles)
        return out


class GateUp:
    """Return ``hidden[token] @ b[e]^T + bias[e]`` of all routes, and its activation; as the Triton backend's class."""

    def __init__(
        self, b: torch.Tensor, routes: int, slots: int, cut: Schedule, activation: int, interleaved: bool, keeps: bool
    ) -> None:
        columns, pair = 2 * cut.columns, NEIGHBORS if interleaved else HALVES
        self._weights = Weights(b, columns, 1 if interleaved else 2)
        rest = (True, False, pair, activation, keeps)
        form = Form(b.dtype, b.dtype, columns, self._weights.major, *rest)
        self._shape = (routes, b.shape[1])
        self._launch = _Launch(form, b, routes, slots)

    def __call__(
        self,
        hidden: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        routes: torch.Tensor,
        tiles: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Launch it, and return ``z[T k, 2F]`` or None and ``h[T k, F]``: hidden and the bias are contiguous."""
        z, h = hidden.new_empty(self._shape) if self._launch.form.keeps else None, hidden.new_empty(self._launch.shape)
        if h.numel():
            self._launch(hidden, self._weights, b, bias, h, z, routes, tiles)
        return z, h


class _Launch:
    """A launch of the kernel; ``b`` is as the class's caller has it."""

    def __init__(self, form: Form, b: torch.Tensor, routes: int, slots: int) -> None:
        count, n, k = b.shape
        halves = 2 if form.pair else 1
        self.form, self.shape = form, (routes, n // halves)
        self._kernel = kernel(form.program, "experts", SIGNATURE, b.device)
        tiles = tile_count(routes, count, ROWS)
        blocks = min(tiles * -(-n // form.columns), processors(b.get_device()))
        self._sizes = (blocks, 1, 1), THREADS, form.shared
        self._numbers = count, tiles, n // halves, k, slots

    def __call__(
        self,
        a: torch.Tensor,
        weights: Weights,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        z: torch.Tensor | None,
        routes: torch.Tensor,
        tiles: torch.Tensor,
    ) -> None:
        """Launch it."""
        a, b = readable(a, not a.data_ptr() % ALIGNED), weights.readable(b)
        a_map = NO_MAP if self.form.gathered else tensor_map(a, (ROWS, BOX), swizzle=SWIZZLE)
        pointers = [0 if x is None else x.data_ptr() for x in (a, bias, out, z, routes, tiles)]
        self._kernel.start(*self._sizes, False, (a_map, weights.map_of(b), *pointers, *self._numbers))
