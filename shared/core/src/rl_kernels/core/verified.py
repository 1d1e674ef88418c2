"""Trials that decide which library products on a CPU keep a row's bits: at first use, once for each kind.

A trial repeats the 16 rows and 64 columns of a small tile, in a drawn order, up to the size of the product. Each number
of the result must have the bits that it has in the tile. The drawn sums cancel, so a number is the rounding of its sum,
which another order of additions changes. Rows of NaN in between must change none of them. The tile itself, on one
thread, must have the same bits in any order of its rows and columns, and be as accurate as sums in FP32 are.
"""

from __future__ import annotations

import enum
import functools
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from rl_kernels.core.constants import STEP
from rl_kernels.core.layout import ALLOCATED
from rl_kernels.core.parts import Parts
from rl_kernels.core.torchlib.observed import without_modes

T = TypeVar("T")
HEIGHTS = (512, 256, 128, 64, 32, 16, 8)
"""Rows of a block. With fewer, libraries often add in the order of a matrix times a vector."""
TILE_ROWS, TILE_COLUMNS = 16, 64
"""Size of the small product with which all products are compared; for steps of a chain, 64 rows and 64 columns."""
ERROR = 16 * 2.0**-24
"""Largest error of a tile in units of the sum of the magnitudes of its terms; sums in FP32 show up to 3.2 * 2**-24."""


class Way(enum.Enum):
    """A way to compute the products of a kind."""

    WHOLE = "a block at a time"
    TILES = "tile by tile on one thread, as the library's bits depend on the size of a block or on threads"
    FP64 = "in FP64, as the library's bits depend on the place of a row"


class Settings(NamedTuple):
    """Settings that a user may change at any time, and by which a library may choose its kernel."""

    threads: int
    onednn: bool


class Kind(NamedTuple):
    """The properties of a product by which a library may choose its kernel.

    Attributes:
        height: rows of the block.
        inner: columns of the block.
        columns: columns of the right operand.
        dtype: dtype of operands and result.
        transposed: whether the right operand is stored column by column.
        offset: bytes from the last aligned address to the right operand.
        settings: settings of PyTorch that are in effect.
        parts: number of parts into which the columns are cut, to be multiplied at once.
    """

    height: int
    inner: int
    columns: int
    dtype: torch.dtype
    transposed: bool
    offset: int
    settings: Settings
    parts: int = 1


_settings = functools.cache(Settings)
_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
_ways: dict[Kind, Way] = {}
_ways_of_steps: dict[tuple[torch.Size, tuple[int, ...], int, Settings], Way] = {}


def current_settings(dtype: torch.dtype) -> Settings:
    """Return the settings for products in ``dtype``: oneDNN may not compute FP32 products in fewer bits."""
    onednn: bool = torch._C._get_mkldnn_enabled()
    if onednn and dtype == torch.float32:
        # PyTorch before 2.9 has one setting for all libraries.
        precision = _precision("mkldnn", "matmul") if _precision else torch.get_float32_matmul_precision()
        onednn = precision in ("none", "ieee", "highest")
    return _settings(torch.get_num_threads(), onednn)


class applied:
    """Turn oneDNN off inside the block, if it is on and the settings say so. (A generator would cost 2 us more.)"""

    __slots__ = ("_switched",)

    def __init__(self, settings: Settings) -> None:
        self._switched = not settings.onednn and torch._C._get_mkldnn_enabled()

    def __enter__(self) -> None:
        if self._switched:
            torch._C._set_mkldnn_enabled(False)

    def __exit__(self, *_: object) -> None:
        if self._switched:
            torch._C._set_mkldnn_enabled(True)


def library(block: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the library's ``block @ right``."""
    return torch.mm(block, right, out=out)


def parts_of(kind: Kind, count: int) -> Parts:
    """Return the product of this kind, of which the first ``count`` rows are the result."""
    return Parts.of((kind.height, kind.inner, kind.columns), kind.parts, count, transposed=kind.transposed)


def offset_of(x: torch.Tensor) -> int:
    """Return the bytes from the last aligned address to the first element."""
    return x.data_ptr() % ALLOCATED


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` row by row without gaps, from an aligned address on."""
    x = x.contiguous()
    return x.clone() if offset_of(x) else x


def way_of(kind: Kind) -> Way:
    """Return the way in which products of this kind keep a row's bits; call it within ``applied(kind.settings)``."""
    way = _ways.get(kind)
    if way is None:
        with without_modes():
            tile = tile_of(kind.inner, kind.dtype, kind.settings.onednn)
            way = Way.FP64 if tile is None else Way.WHOLE if _block_matches_tile(kind, tile) else Way.TILES
        _ways[kind] = way
    return way


def counts() -> Counter[Way]:
    """Return the number of kinds of products that take each way, of all that this process has tried."""
    return Counter(_ways.values())


class _Tile(NamedTuple):
    rows: torch.Tensor
    columns: torch.Tensor
    product: torch.Tensor


@functools.cache
def tile_of(inner: int, dtype: torch.dtype, onednn: bool) -> _Tile | None:
    """Return the tile of a trial, on one thread; None if its bits follow place or neighbors, or it is not accurate."""
    return on_one_thread(lambda: _try_tile(inner, dtype))


def _try_tile(inner: int, dtype: torch.dtype) -> _Tile | None:
    draw = torch.Generator().manual_seed(inner)
    rows, columns = _canceling(inner, (TILE_ROWS, TILE_COLUMNS), dtype, draw)
    product = library(rows, columns.t())
    if not _is_accurate(inner, dtype, draw):
        return None
    for _ in range(4):
        row, column = permuted(TILE_ROWS, draw), permuted(TILE_COLUMNS, draw)
        moved = library(rows[row], columns[column].t())
        if not torch.equal(moved, product[row][:, column]):
            return None
    for value in (torch.nan, torch.inf, 0.0):
        beside = rows.clone()
        beside[::2] = value
        if not torch.equal(library(beside, columns.t())[1::2], product[1::2]):
            return None
    return _Tile(rows, columns, product)


def _block_matches_tile(kind: Kind, tile: _Tile) -> bool:
    draw = torch.Generator().manual_seed(kind.inner)
    row = torch.randint(TILE_ROWS, (kind.height,), generator=draw, device="cpu")
    column = torch.randint(TILE_COLUMNS, (kind.columns,), generator=draw, device="cpu")
    block = tile.rows[row]
    shape = (kind.columns, kind.inner) if kind.transposed else (kind.inner, kind.columns)
    right = _zeros_at_offset(shape, (shape[1], 1), kind.dtype, kind.offset)
    right = right.t() if kind.transposed else right
    right.copy_(tile.columns[column].t())
    expected = tile.product[row][:, column]
    if kind.parts > 1:
        parts = parts_of(kind, kind.height)
        product = parts.multiply(block, right)
        block[::2] = torch.nan
        return torch.equal(product, expected) and torch.equal(parts.multiply(block, right)[1::2], expected[1::2])
    if not torch.equal(library(block, right), expected):
        return False
    # Again into a part of a wider result, beside rows of NaN.
    part = _zeros_at_offset(expected.shape, (kind.columns + 17, 1), kind.dtype, expected.itemsize)
    block[::2] = torch.nan
    return torch.equal(library(block, right, part)[1::2], expected[1::2])


def _try_steps(shape: torch.Size, strides: tuple[int, ...], offset: int, settings: Settings) -> Way:
    draw = torch.Generator().manual_seed(STEP)
    left, right = _canceling(STEP, (TILE_COLUMNS, TILE_COLUMNS), torch.float32, draw)
    start = normal((TILE_COLUMNS, TILE_COLUMNS), draw) * 2.0**-24

    def step() -> torch.Tensor:
        return start.addmm(left, right.t())

    product, order = on_one_thread(step), permuted(TILE_COLUMNS, draw)
    moved = on_one_thread(lambda: start[order][:, order].addmm(left[order], right[order].t()))
    if not torch.equal(moved, product[order][:, order]):
        return Way.FP64
    row = torch.randint(TILE_COLUMNS, shape[:1], generator=draw, device="cpu")
    column = torch.randint(TILE_COLUMNS, shape[1:], generator=draw, device="cpu")
    out = _zeros_at_offset(tuple(shape), strides, torch.float32, offset)
    out.copy_(start[row][:, column])
    # As the operands of a chain lie: term by term.
    out.addmm_(left[row].t().contiguous().t(), right[column].t().contiguous())
    return Way.WHOLE if torch.equal(out, product[row][:, column]) else Way.TILES


def way_of_steps(out: torch.Tensor, settings: Settings) -> Way:
    """Return the way in which products of 16 terms are added to FP32 ``out`` with the same bits everywhere in it."""
    kind = out.shape, out.stride(), offset_of(out), settings
    way = _ways_of_steps.get(kind)
    if way is None:
        with without_modes():
            way = _ways_of_steps[kind] = _try_steps(*kind)
    return way


def _canceling(
    inner: int, counts: tuple[int, int], dtype: torch.dtype, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and columns, ``[count, inner]``, whose products sum to zero but for rounding."""
    order = permuted(inner, draw)
    rows, columns = (normal((count, inner // 2), draw) for count in counts)
    pairs = torch.cat((rows, rows), 1), torch.cat((columns, -columns), 1)
    left, right = (x[:, order].to(dtype) for x in pairs)
    return left, right


def permuted(count: int, draw: torch.Generator) -> torch.Tensor:
    """Return a random permutation of ``count`` indices."""
    return torch.randperm(count, generator=draw, device="cpu")


def normal(shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """Return normally distributed random numbers in FP32."""
    return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")


def _is_accurate(inner: int, dtype: torch.dtype, draw: torch.Generator) -> bool:
    rows, columns = (normal((count, inner), draw).to(dtype) for count in (TILE_ROWS, TILE_COLUMNS))
    product = library(rows, columns.t()).double()
    left, right = rows.double(), columns.double().t()
    exact, size = left @ right, left.abs() @ right.abs()
    return bool(((product - exact).abs() <= ERROR * size + torch.finfo(dtype).eps / 2 * product.abs()).all())


def _zeros_at_offset(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
    """Return zeros with these strides, ``offset`` bytes after an aligned address."""
    first = offset // dtype.itemsize
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.zeros(first + last + 1, dtype=dtype, device="cpu").as_strided(shape, strides, first)


def on_one_thread(call: Callable[[], T]) -> T:
    """Return the result of a call that may use one thread of the CPU."""
    threads = torch.get_num_threads()
    if threads == 1:
        return call()
    torch.set_num_threads(1)
    try:
        return call()
    finally:
        torch.set_num_threads(threads)
