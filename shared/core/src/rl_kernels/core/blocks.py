"""Products of a CPU's library on blocks of rows of fixed heights, planned once for each kind of operands.

A plan says how the operands are packed, and how each block is multiplied: whole, in parts of its columns, in tiles of
one small shape, or in FP64, as ``verified`` finds by a trial of that kind of block. All ways give a row the same bits
in every block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rl_kernels.core import fp64, verified
from rl_kernels.core.constants import STEP
from rl_kernels.core.parts import Parts
from rl_kernels.core.rowwise.operands import pad_to
from rl_kernels.core.torchlib.observed import without_modes
from rl_kernels.core.verified import HEIGHTS, TILE_COLUMNS, TILE_ROWS, Kind, Settings, Way

CALL = 12
"""Cost of a call of the library, in rows of a block; measured for K x N of 576x192 to 1536x576."""
FEW = (1, 4)
"""Rows of lower blocks, for products whose bits they keep."""
PARTED_ROWS, PART_COLUMNS, PART_TERMS = 16, 64, 1 << 14
"""MKL multiplies few rows on one thread. So the columns of blocks of at most so many rows are cut into a part for each
thread, of at least so many columns, if the right operand has at least so many numbers for each row of the block."""
WIDTH = 4096
"""Largest number of columns of a block: bounds the memory of a trial, and of a piece of a 16-bit operand in FP32."""
MANY, PAIRS = 256, 8
"""Sums of at least ``MANY`` terms are padded to a multiple of ``PAIRS``: a trial needs pairs of terms, which cancel."""


class _Step(NamedTuple):
    """The product of a block.

    Attributes:
        rows: of the left operand; None for all.
        missing: rows of zeros that fill the block, or None.
        multiply: computes the product.
        size: rows and columns of the product that belong to the result; None if the library writes the result.
    """

    rows: slice | None
    missing: torch.Tensor | None
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    size: tuple[int, int] | None

    def run(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Return the product of all rows, or write it to its rows of ``out``."""
        rows, missing, multiply, size = self
        block, part = (left, out) if rows is None or out is None else (left[rows], out[rows])
        if missing is not None:
            block = torch.cat((block, missing))
        if size is None:
            return verified.library(block, right, part)
        product, (count, width) = multiply(block, right), size
        if part is not None:
            return part.copy_(product[:count, :width])
        # A copy, because autograd would forbid in-place changes of a view.
        return (product if product.shape[1] == width else product[:, :width]).narrow_copy(0, 0, count)


class _PartedStep(NamedTuple):
    """The product of a block whose columns are cut into parts.

    Attributes:
        rows: of the left operand; None for all.
        parts: the batch of products.
    """

    rows: slice | None
    parts: Parts

    def run(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Return the product of all rows, or write it to its rows of ``out``."""
        rows, parts = self
        product = parts.multiply(left if rows is None else left[rows], right)
        return product if out is None else (out if rows is None else out[rows]).copy_(product)


class _Piece(NamedTuple):
    """Columns of the right operand (None for all), whether they are packed, and the blocks that they multiply."""

    columns: slice | None
    is_packed: bool
    steps: list[_Step | _PartedStep]


class Plan:
    """The product ``a @ b`` in the dtype of ``a``, for operands of one kind, under settings that are in effect.

    Args:
        a: ``[M, K]``, FP32 or 16 bits, on a CPU.
        b: ``[K, N]`` in the dtype of ``a``, or in 16 bits beside an FP32 ``a``.
        settings: ``verified.current_settings``, which are applied.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, settings: Settings) -> None:
        (count, columns), left, dtype = (a.shape[0], b.shape[1]), _packed_left(a), a.dtype
        self._packs_left, self._pieces = left is not a, list[_Piece]()
        for first in range(0, columns, WIDTH):
            part = slice(first, first + WIDTH) if columns > WIDTH else None
            piece = b if part is None else b[:, part]
            right = _packed_right(piece, dtype)
            layout = left.shape[1], right.shape[1], dtype, right.stride(0) == 1, verified.offset_of(right), settings
            self._pieces.append(_Piece(part, right is not piece, _steps(count, piece.shape[1], layout)))
        self._is_one_step = len(self._pieces) == 1 == len(self._pieces[0].steps)

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Return the product, or write it to ``out`` and return that."""
        left = _packed_left(a) if self._packs_left else a
        if out is None and not self._is_one_step:
            out = a.new_empty((a.shape[0], b.shape[1]))
        for columns, is_packed, steps in self._pieces:
            right, part = (b, out) if columns is None or out is None else (b[:, columns], out[:, columns])
            if is_packed:
                right = _packed_right(right, a.dtype)
            for step in steps:
                result = step.run(left, right, part)
        return result if out is None else out


def _steps(count: int, width: int, layout: tuple[Any, ...]) -> list[_Step | _PartedStep]:
    """Return the products of ``count`` rows by ``width`` columns; ``layout`` is a ``Kind`` without its height."""
    steps, first = list[_Step | _PartedStep](), 0
    for height in heights(count):
        end = min(first + height, count)
        for few in FEW:
            if end - first <= few < height and verified.way_of(_in_parts(Kind(few, *layout))) is Way.WHOLE:
                height = few
                break
        rows = None if end - first == count else slice(first, end)
        steps.append(_step(rows, end - first, width, _in_parts(Kind(height, *layout))))
        first = end
    return steps


def _in_parts(kind: Kind) -> Kind:
    """Return the kind with its columns cut into parts, if that is faster and keeps a row's bits, or else as it is."""
    columns = kind.columns
    if (
        kind.dtype != torch.float32
        or kind.height > PARTED_ROWS
        or kind.inner * columns < kind.height * PART_TERMS
        or not torch.backends.mkl.is_available()
    ):
        return kind
    most = min(kind.settings.threads, columns // PART_COLUMNS)
    parts = max((parts for parts in range(2, most + 1) if columns % parts == 0), default=1)
    parted = kind._replace(parts=parts)
    return parted if parts > 1 and verified.way_of(parted) is Way.WHOLE else kind


def heights(count: int) -> list[int]:
    """Return the heights of the blocks of ``count`` rows, the highest first; only the last one may have fewer rows."""
    return [HEIGHTS[0]] * (count // HEIGHTS[0]) + _cheapest(count % HEIGHTS[0])[1]


@functools.lru_cache(HEIGHTS[0])
def _cheapest(count: int) -> tuple[int, list[int]]:
    """Return the cost of the cheapest blocks of fewer rows than the highest block has, and their heights."""
    if not count:
        return 0, []
    covering = min(height for height in HEIGHTS if height >= count)
    below = max((height for height in HEIGHTS if height < count), default=covering)
    cost, rest = _cheapest(max(count - below, 0))
    return min((CALL + covering, [covering]), (CALL + below + cost, [below, *rest]))


def _step(rows: slice | None, count: int, width: int, kind: Kind) -> _Step | _PartedStep:
    if kind.parts > 1:
        return _PartedStep(rows, verified.parts_of(kind, count))
    way, missing = verified.way_of(kind), kind.height - count
    is_whole = way is Way.WHOLE and not missing and width == kind.columns
    zeros = _zeros(missing, kind.inner, kind.dtype) if missing else None
    return _Step(rows, zeros, MULTIPLY[way], None if is_whole else (count, width))


@functools.lru_cache(256)
def _zeros(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    with without_modes():
        return torch.zeros((rows, columns), dtype=dtype, device="cpu")


def _packed_left(a: torch.Tensor) -> torch.Tensor:
    """Return the left operand as the library gets it: row by row without gaps, aligned, its inner size padded."""
    return verified.aligned(_pad_inner(a, 1))


def _packed_right(b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the right operand as the library gets it: without gaps, row by row or column by column, sizes padded."""
    b = _pad_inner(b.to(dtype), 0)
    if b.shape[1] < TILE_ROWS:
        # Libraries multiply by a narrow matrix in other orders.
        b = pad_to(b, 1, TILE_ROWS)
    if b.stride() == (1, b.shape[0]):
        return b
    return b.t().contiguous().t() if b.stride(0) == 1 else b.contiguous()


def _pad_inner(x: torch.Tensor, dim: int) -> torch.Tensor:
    return pad_to(x, dim, inner_multiple(x.shape[dim]))


def inner_multiple(inner: int) -> int:
    """Return the multiple to which an inner size is padded. Short sums often have the same bits in another order."""
    return PAIRS if inner >= MANY else STEP


def tiles(block: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``block @ right`` by library products of the shape of the tile that was tried; zeros are appended."""
    return verified.on_one_thread(lambda: _tiles(block, right))


def _tiles(block: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    rows, columns = pad_to(block, 0, TILE_ROWS), pad_to(right.t(), 0, TILE_COLUMNS)
    out = block.new_empty((len(rows), len(columns)))
    for column in range(0, len(columns), TILE_COLUMNS):
        part = slice(column, column + TILE_COLUMNS)
        # A copy, so that all tiles lie alike in memory.
        right = columns[part].clone(memory_format=torch.contiguous_format)
        for row in range(0, len(rows), TILE_ROWS):
            here = slice(row, row + TILE_ROWS)
            out[here, part] = verified.library(rows[here], right.t())
    return out


MULTIPLY: dict[Way, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Way.WHOLE: lambda block, right: verified.library(block, right),
    Way.TILES: tiles,
    Way.FP64: lambda block, right: fp64.matmul(block, right).to(block.dtype),
}
