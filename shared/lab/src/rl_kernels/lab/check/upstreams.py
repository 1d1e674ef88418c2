"""The kinds of upstream gradients that a backward pass may be given."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from rl_kernels.core.contract import ALL_DTYPES
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.guard import Results

SCALES = {
    " upstream x0": 0.0,
    " upstream x-1": -1.0,
    " upstream x3": 3.0,
    " upstream x1e-06": 1e-6,
    " upstream x1e-12": 1e-12,
}
LARGE = (65536.0, 64.0)
"""A loss scale that trainers use, and a smaller one for gradients that it would make overflow."""


@dataclass(frozen=True)
class Upstream:
    """An upstream gradient for each output.

    Attributes:
        label: suffix to the name of a gradient.
        values: the upstream gradients that the candidate gets.
        scale: how many times larger than usual they are.
        ignored: output -> positions where ``values`` may hold anything; the definition gets 0 there.
    """

    label: str
    values: Results
    scale: float = 1.0
    ignored: Mapping[str, torch.Tensor] | None = None

    @property
    def defined(self) -> Results:
        """The upstream gradients that the definition gets."""
        ignored = self.ignored or {}
        return {
            name: value.masked_fill(ignored[name], 0.0) if name in ignored else value
            for name, value in self.values.items()
        }


def upstreams(cell: Cell, upstream: Results, peak: float) -> Iterator[Upstream]:
    """Yield the random upstream, then variants in other sizes and layouts; for a brief cell, only one variant.

    ``peak`` is the largest magnitude of the gradients for the random upstream.
    """
    most = torch.finfo(ALL_DTYPES[cell.dtype_name]).max / 2
    # Intermediate gradients, such as those of logits, can be as large as the upstream of their row, in the same dtype.
    peak = max(peak, *(float(value.abs().max()) for value in upstream.values() if value.ndim and value.numel()), 0.0)
    large = next((scale for scale in LARGE if peak * scale < most), 1.0)
    kinds = list(_kinds(cell, upstream, large))
    yield Upstream("", upstream)
    if cell.is_brief or cell.is_slow:
        yield kinds[zlib.crc32(cell.case.name.encode()) % len(kinds)]
        if cell.dtype_name == "fp16":
            # FP16 loses small gradients, which is why trainers scale their losses.
            yield kinds[len(SCALES)]
    else:
        yield from kinds


def _kinds(cell: Cell, upstream: Results, large: float) -> Iterator[Upstream]:
    for label, scale in SCALES.items():
        yield Upstream(label, _scaled(upstream, scale), abs(scale))
    yield Upstream(f" upstream x{large:g}", _scaled(upstream, large), large)
    # What ``result.sum().backward()`` gives: one number, expanded.
    ones = {name: value.new_ones(()).expand(value.shape) for name, value in upstream.items()}
    yield Upstream(" upstream expanded", ones)
    if any(value.ndim for value in upstream.values()):
        for dim in range(max(value.ndim for value in upstream.values())):
            yield Upstream(f" upstream expanded over dim {dim}", {name: _along(v, dim) for name, v in upstream.items()})
        yield Upstream(" upstream zero in some rows", {name: _some_zero(value) for name, value in upstream.items()})
        strided = {name: torch.stack((value, value), -1)[..., 0] for name, value in upstream.items()}
        yield Upstream(" upstream strided", strided)
    ignored = cell.spec.ignored(cell.inputs)
    if ignored is not None and ignored.any():
        places = {name: ignored for name, value in upstream.items() if value.shape == ignored.shape}
        filled = {name: upstream[name].masked_fill(ignored, torch.nan) for name in places}
        if filled:
            yield Upstream(" upstream NaN where ignored", {**upstream, **filled}, ignored=places)


def _scaled(upstream: Results, scale: float) -> Results:
    return {name: value * scale for name, value in upstream.items()}


def _along(value: torch.Tensor, dim: int) -> torch.Tensor:
    """Return an upstream as of ``(value.sum(dim) * weights).sum()``: constant along a dim, with stride 0."""
    if dim >= value.ndim or not value.shape[dim]:
        return value
    return value.narrow(dim, 0, 1).expand(value.shape)


def _some_zero(value: torch.Tensor) -> torch.Tensor:
    flat = torch.arange(value.numel(), device=value.device).view(value.shape)
    return torch.where(flat % 3 == 1, value, 0.0)
