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
from collections.abc import Callable
from itertools import product

import torch

from rl_kernels.core import fp64, verified
from rl_kernels.core.blocks import WIDTH, Plan, inner_multiple
from rl_kernels.core.calls import Memory, kind_of
from rl_kernels.core.constants import STEP
from rl_kernels.core.rowwise.operands import compute_dtype, pad_to
from rl_kernels.core.scratch import Scratch
from rl_kernels.core.verified import HEIGHTS, TILE_COLUMNS, TILE_ROWS, Kind, Settings, Way

ROWS = 512
"""Rows of a chain that are converted to FP32 at a time."""
SLAB = 2048
"""Rows of a gradient that are finished before the next ones, so that they stay in the cache."""
SIZES = ((100, 37), (64, 256), (576, 192))
"""K and N that ``doctor`` tries."""
_total = Scratch()
_memory = Memory[Callable[..., torch.Tensor]]()


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
    kind = kind_of((a, b, out_dtype, bias is None))
    launch = _memory.get(kind)
    if launch is None:
        launch = prepare(a, b, bias, out_dtype)
        if kind is not None:
            _memory.add(kind, launch)
    return launch(a, b, bias, out)


def prepare(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> Callable[..., torch.Tensor]:
    """Return ``matmul`` of operands of this kind (``calls``), to be called with them, the bias and maybe ``out``."""
    computed = compute_dtype(a.dtype)
    result = out_dtype or computed
    if not a.is_cpu or computed == torch.float64:
        return functools.partial(_in_fp64, result)
    dtype, plans = result if result == a.dtype == b.dtype and bias is None else computed, dict[Settings, Plan]()
    converts = a.dtype != dtype

    def launch(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        settings, left = verified.current_settings(dtype), a.to(dtype) if converts else a
        plan = plans.get(settings)
        if plan is not None and settings.onednn:
            product = plan(left, b, out)
        else:
            with verified.applied(settings):
                plan = plan or plans.setdefault(settings, Plan(left, b, settings))
                product = plan(left, b, out)
        if bias is not None:
            product += bias
        return product if dtype == result else product.to(result)

    return launch


def _in_fp64(
    result: torch.dtype,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    product = fp64.matmul(a, b)
    if bias is not None:
        product += bias
    return product.to(result) if out is None else out.copy_(product)


def chain_dw(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Add ``a[M, K]^T @ dc[M, N]`` to ``out[K, N]`` in place, 16 rows of ``a`` per step, and return ``out``.

    Splitting M at multiples of 16 over several calls, or appending zero rows, changes no bit. ``out`` is FP32, for FP64
    operands FP64, and has any strides.
    """
    if not out.is_cpu or out.dtype == torch.float64:
        return fp64.chain_dw(a, dc, out)
    if len(a) and out.shape[1]:
        for first in range(0, len(out), SLAB):
            part = slice(first, first + SLAB)
            _add_chain(a[:, part], dc, out[part])
    return out


def write_dw(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write ``a[M, K]^T @ dc[M, N]``, the chain of ``chain_dw`` from 0, to ``out[K, N]``, rounded; return ``out``."""
    if out.dtype == compute_dtype(out.dtype):
        return chain_dw(a, dc, out.zero_())
    for first in range(0, len(out), SLAB):
        part = slice(first, first + SLAB)
        out[part] = chain_dw(a[:, part], dc, _total(out, out[part].shape, torch.float32).zero_())
    return out


def _add_chain(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor) -> None:
    # Libraries add to a narrow matrix in other orders, and to other strides through a copy in each step.
    is_plain = min(out.shape) >= TILE_COLUMNS and 1 in out.stride()
    total = out if is_plain else pad_to(pad_to(out, 0, TILE_COLUMNS), 1, TILE_COLUMNS).contiguous()
    settings = verified.current_settings(out.dtype)
    with verified.applied(settings):
        way = verified.way_of_steps(total, settings)
        if way is Way.FP64:
            fp64.chain_dw(a, dc, out)
            return
        for first in range(0, len(a), ROWS):
            part = slice(first, first + ROWS)
            left, right = (_padded_terms(x[part], size) for x, size in zip((a, dc), total.shape, strict=True))
            if way is Way.WHOLE:
                _add_steps(left, right, total)
            else:
                verified.on_one_thread(functools.partial(_add_steps_by_tiles, left, right, total))
    if not is_plain:
        out.copy_(total[: out.shape[0], : out.shape[1]])


def _padded_terms(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows in FP32, whole steps of them, and ``size`` columns; zeros are appended."""
    return verified.aligned(pad_to(pad_to(x.float(), 1, size), 0, STEP))


def _add_steps(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor) -> None:
    for left_step, right_step in zip(left.t().split(STEP, 1), right.split(STEP), strict=True):
        total.addmm_(left_step, right_step)


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
    size = inner + -inner % inner_multiple(inner), min(max(columns, TILE_ROWS), WIDTH)
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
