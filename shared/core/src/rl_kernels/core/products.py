"""Matrix products on a CPU in which the bits of a row depend on that row and the right operand alone.

A library chooses its kernel, and with it the order of a sum, by the number of rows. So rows go to it in blocks of fixed
heights, the last one padded with zeros. That a row then has the same bits in every block, at every place and beside any
neighbors is no promise of the library: ``verified`` tries each kind of block before its first use. Where the trial
fails, rows go in tiles of one small shape, and where a tile fails too, in FP64.

16-bit operands with a result of the same dtype take the library's 16-bit product, which rounds its FP32 sum once. With
an FP32 result or a bias, which is added in FP32, they are converted to FP32, exactly.
"""

from __future__ import annotations

import functools
from collections import Counter
from itertools import product

import torch

from rl_kernels.core import fp64, verified
from rl_kernels.core.constants import STEP
from rl_kernels.core.rowwise.operands import compute_dtype, pad_to
from rl_kernels.core.verified import HEIGHTS, TILE_COLUMNS, TILE_ROWS, Kind, Settings, Way

WIDTH = 4096
"""Largest number of columns of a block: bounds the memory of a trial, and of a piece of a 16-bit operand in FP32."""
MANY, PAIRS = 256, 8
"""Sums of at least ``MANY`` terms are padded to a multiple of ``PAIRS``: a trial needs pairs of terms, which cancel."""
ROWS = 512
"""Rows of a chain that are converted to FP32 at a time."""
SIZES = ((100, 37), (64, 256), (576, 192))
"""K and N that ``doctor`` tries."""


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``a @ b + bias``, summed in ``compute_dtype(a.dtype)`` or better and rounded once.

    On a GPU the products come from the vendor's library, and bits may depend on the batch.

    Args:
        a: ``[M, K]``, any strides.
        b: ``[K, N]``, any strides; in the dtype of ``a``, or in 16 bits beside an FP32 ``a``.
        bias: ``[N]`` or None.
        out_dtype: dtype of the result, by default ``compute_dtype(a.dtype)``.
        out: ``[M, N]`` in the dtype of the result, which is ``compute_dtype(a.dtype)``, or None. It is written and
            returned.
    """
    computed = compute_dtype(a.dtype)
    result_dtype = out_dtype or computed
    if a.device.type != "cpu" or a.dtype == torch.float64:
        product = _with_bias(fp64.matmul(a, b), bias, result_dtype)
        return product if out is None else out.copy_(product)
    if result_dtype == a.dtype == b.dtype and result_dtype != computed and bias is None:
        return _product(a, b, result_dtype)
    return _with_bias(_product(a.to(computed), b, computed, out), bias, result_dtype)


def _with_bias(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if bias is not None:
        product += bias
    return product.to(dtype)


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the product of ``a`` in its dtype, or write it to ``out``."""
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
    left = _pad_inner(a, 1).contiguous()
    if verified.offset_of(left):
        left = left.clone()
    settings = verified.current_settings(dtype)
    with verified.applied(settings):
        if b.shape[1] <= WIDTH:
            _multiply_columns(left, b, out, settings)
            return out
        for first in range(0, b.shape[1], WIDTH):
            part = slice(first, first + WIDTH)
            _multiply_columns(left, b[:, part], out[:, part], settings)
    return out


def _multiply_columns(left: torch.Tensor, b: torch.Tensor, out: torch.Tensor, settings: Settings) -> None:
    """Write ``left @ b`` to ``out``, block by block."""
    width = out.shape[1]
    if not width:
        return
    right = _packed_right(b, out.dtype)
    padded = right.shape[1]
    layout = padded, out.dtype, right.stride(0) == 1, verified.offset_of(right), settings
    for first, end, height in blocks(out.shape[0]):
        full, alone = end - first == height, height >= out.shape[0]
        block = left if alone else left[first:end]
        part = out if alone else out[first:end]
        if not full:
            block = pad_to(block, 0, height)
        way = verified.way_of(Kind(height, left.shape[1], *layout))
        if way is not Way.WHOLE:
            product = (tiles if way is Way.TILES else _in_fp64)(block, right)
        elif full and width == padded:
            verified.library(block, right, part)
            continue
        else:
            product = verified.library(block, right)
        part.copy_(product[: end - first, :width])


@functools.lru_cache(1024)
def blocks(count: int) -> tuple[tuple[int, int, int], ...]:
    """Cut rows into the blocks that the library gets, the highest first; return (first row, end, height) of each."""
    cuts, first = [], 0
    for height in HEIGHTS:
        while count - first >= height or (height == HEIGHTS[-1] and first < count):
            cuts.append((first, min(first + height, count), height))
            first += height
    return tuple(cuts)


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
    return pad_to(x, dim, _inner_multiple(x.shape[dim]))


def _inner_multiple(inner: int) -> int:
    """Return the multiple to which an inner size is padded. Short sums often have the same bits in another order."""
    return PAIRS if inner >= MANY else STEP


def tiles(block: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``block @ right`` by library products of the shape of the tile that was tried."""
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


def _in_fp64(block: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return fp64.matmul(block, right).to(block.dtype)


def chain_dw(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Add ``a[M, K]^T @ dc[M, N]`` to ``out[K, N]`` in place, 16 rows of ``a`` per step, and return ``out``.

    Splitting M at multiples of 16 over several calls, or appending zero rows, changes no bit. ``out`` is FP32, for FP64
    operands FP64, and has any strides.
    """
    if out.device.type != "cpu" or out.dtype == torch.float64:
        return fp64.chain_dw(a, dc, out)
    if not len(a) or not out.numel():
        return out
    # Libraries add to a narrow matrix in other orders, and to other strides through a copy in each step.
    is_plain = min(out.shape) >= TILE_COLUMNS and 1 in out.stride()
    total = out if is_plain else pad_to(pad_to(out, 0, TILE_COLUMNS), 1, TILE_COLUMNS).contiguous()
    settings = verified.current_settings(out.dtype)
    with verified.applied(settings):
        way = verified.way_of_steps(total, settings)
        if way is Way.FP64:
            return fp64.chain_dw(a, dc, out)
        for first in range(0, len(a), ROWS):
            part = slice(first, first + ROWS)
            left, right = (_padded_terms(x[part], size) for x, size in zip((a, dc), total.shape, strict=True))
            if way is Way.WHOLE:
                _add_steps(left, right, total)
            else:
                verified.on_one_thread(functools.partial(_add_steps_by_tiles, left, right, total))
    return out if is_plain else out.copy_(total[: out.shape[0], : out.shape[1]])


def _padded_terms(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows in FP32, whole steps of them, and ``size`` columns; zeros are appended."""
    return pad_to(torch.nn.functional.pad(x.float(), (0, size - x.shape[1])), 0, STEP).contiguous()


def _add_steps(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor) -> None:
    for row in range(0, len(left), STEP):
        total.addmm_(left[row : row + STEP].t(), right[row : row + STEP])


def _add_steps_by_tiles(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor) -> None:
    left, right = (pad_to(x, 1, TILE_COLUMNS) for x in (left, right))
    for row in range(0, total.shape[0], TILE_COLUMNS):
        for column in range(0, total.shape[1], TILE_COLUMNS):
            part = total[row : row + TILE_COLUMNS, column : column + TILE_COLUMNS]
            # A copy, so that all tiles lie alike in memory.
            tile = part.new_zeros((TILE_COLUMNS, TILE_COLUMNS))
            tile[: part.shape[0], : part.shape[1]] = part
            here, there = (x[:, first : first + TILE_COLUMNS] for x, first in ((left, row), (right, column)))
            _add_steps(here.contiguous(), there.contiguous(), tile)
            part.copy_(tile[: part.shape[0], : part.shape[1]])


def ways(inner: int, columns: int, dtype: torch.dtype, *, transposed: bool = True) -> Counter[Way]:
    """Return for how many heights of a block the product with ``[inner, columns]`` takes each way."""
    settings = verified.current_settings(dtype)
    size = inner + -inner % _inner_multiple(inner), min(max(columns, TILE_ROWS), WIDTH)
    with verified.applied(settings):
        kinds = (Kind(height, *size, dtype, transposed, 0, settings) for height in HEIGHTS)
        return Counter(verified.way_of(kind) for kind in kinds)


def note(inner: int, columns: int, dtype: torch.dtype, *, transposed: bool = True) -> str | None:
    """Return the note of ``explain`` on such products; None if the CPU's library multiplies all blocks whole."""
    counts = ways(inner, columns, dtype, transposed=transposed)
    slow = [way for way in (Way.FP64, Way.TILES) if counts[way]]
    return f"products {slow[0].value}" if slow else None


def tried() -> str:
    """Return a summary for ``doctor``: the ways in which products of a few sizes and all dtypes are computed here."""
    counts = Counter[Way]()
    for (inner, columns), dtype in product(SIZES, (torch.float32, torch.bfloat16, torch.float16)):
        for transposed in (True, False):
            counts += ways(inner, columns, dtype, transposed=transposed)
    summary = "; ".join(f"{counts[way]} {way.value}" for way in Way if counts[way])
    return f"{counts.total()} kinds tried: {summary}"
