"""Batches of FP32 products on a CPU in which the bits of a number depend on its row and column alone.

As in ``products``, each kind of batch is tried at first use: in all of its matrices every number must have the bits
that it has in the small tile of ``verified``. Adding a product to a result must give the bits of the product, then
added. Where the trial fails, each product is computed tile by tile, and where the tile fails too, in FP64.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from rl_kernels.core import fp64, verified
from rl_kernels.core.blocks import tiles
from rl_kernels.core.torchlib.observed import without_modes
from rl_kernels.core.verified import TILE_COLUMNS, TILE_ROWS, Settings, Way, normal, tile_of


class Kind(NamedTuple):
    """The properties of a batch of products by which a library may choose its kernel.

    Attributes:
        size: number of matrices, rows, inner size and columns.
        left: strides of a matrix of the left operand.
        right: strides of a matrix of the right operand.
        to: strides of a matrix of the result that is added to, or None.
        settings: settings of PyTorch that are in effect.
    """

    size: tuple[int, int, int, int]
    left: tuple[int, ...]
    right: tuple[int, ...]
    to: tuple[int, ...] | None
    settings: Settings


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a[B, M, K] @ b[B, K, N]`` in FP32; with ``out`` add the product to it in place.

    On a GPU the products are FP64, rounded once, and their bits may depend on the batch.

    Args:
        a: FP32, each matrix row by row or column by column; K is a multiple of 16.
        b: FP32, each matrix row by row or column by column.
        out: ``[B, M, N]``, FP32, row by row, or None.
    """
    if a.device.type != "cpu":
        product = torch.bmm(a.double(), b.double()).float()
        return product if out is None else out.add_(product)
    settings = verified.current_settings(torch.float32)
    strides = a.stride()[1:], b.stride()[1:], None if out is None else out.stride()[1:]
    with verified.applied(settings):
        way = way_of(Kind((*a.shape, b.shape[2]), *strides, settings))
        if way is Way.WHOLE:
            return library(a, b, out)
        multiply_one = tiles if way is Way.TILES else fp64.matmul
        parts = [multiply_one(rows, columns)[: a.shape[1], : b.shape[2]] for rows, columns in zip(a, b, strict=True)]
        return torch.stack(parts) if out is None else out.add_(torch.stack(parts))


def library(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return the library's product, added to ``out`` if it is given."""
    return torch.bmm(a, b) if out is None else out.baddbmm_(a, b)


@functools.lru_cache(8192)
def way_of(kind: Kind) -> Way:
    """Return the way in which products of this kind keep a number's bits; call it within ``applied(kind.settings)``."""
    with without_modes():
        return _try_kind(kind)


def note(rows: int, inner: int, columns: int) -> str | None:
    """Return the note of ``explain`` on such products; None if the CPU's library multiplies a batch at a time."""
    settings = verified.current_settings(torch.float32)
    with verified.applied(settings):
        way = way_of(Kind((1, rows, inner, columns), (inner, 1), (1, inner), None, settings))
    return None if way is Way.WHOLE else f"products {way.value}"


def _try_kind(kind: Kind) -> Way:
    count, rows, inner, columns = kind.size
    tile = tile_of(inner, torch.float32, kind.settings.onednn)
    if tile is None:
        return Way.FP64
    draw = torch.Generator("cpu").manual_seed(inner)
    row = torch.randint(TILE_ROWS, (rows,), generator=draw, device="cpu")
    column = torch.randint(TILE_COLUMNS, (columns,), generator=draw, device="cpu")
    left = _matrices(count, rows, inner, kind.left).copy_(tile.rows[row])
    right = _matrices(count, inner, columns, kind.right).copy_(tile.columns[column].t())
    expected, start = tile.product[row][:, column], None
    if kind.to is not None:
        # As small as the sums, whose terms nearly cancel, so that it does not hide them.
        start = normal((rows, columns), draw) * 2.0**-20
        expected = start + expected
    for checked in (slice(None), slice(1, None, 2)):
        out = None
        if kind.to is not None and start is not None:
            out = _matrices(count, rows, columns, kind.to).copy_(start)
        result = library(left, right, out)[:, checked]
        if not torch.equal(result, expected[checked].expand_as(result)):
            return Way.TILES
        # Again beside rows of NaN.
        left[:, ::2] = torch.nan
    return Way.WHOLE


def _matrices(count: int, rows: int, columns: int, strides: tuple[int, ...]) -> torch.Tensor:
    """Return uninitialized matrices with these strides, one after the other."""
    size = max(rows * strides[0], columns * strides[1])
    return torch.empty_strided((count, rows, columns), (size, *strides), dtype=torch.float32, device="cpu")
