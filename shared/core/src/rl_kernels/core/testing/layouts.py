"""Change the layout of a batch, and bring results back to the original layout.

Each function takes per-token tensors by name, all ``[B, T, ...]``, and returns them in the new layout, with ``undo``.
``undo`` brings results (by any names) back to the original positions of their tokens. Gradients flow through both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

Tensors = dict[str, torch.Tensor]
Undo = Callable[[Mapping[str, torch.Tensor]], Tensors]


@dataclass(frozen=True, eq=False)
class Layout:
    """Tensors in a layout, and ``undo`` for results in that layout."""

    tensors: Tensors
    undo: Undo


@dataclass(frozen=True, eq=False)
class Packed(Layout):
    """Tensors ``[total, ...]`` without padding; sequence i is at ``cu_seqlens[i]:cu_seqlens[i + 1]`` (int32)."""

    cu_seqlens: torch.Tensor


@dataclass(frozen=True, eq=False)
class Chunks:
    """Tensors cut into parts; ``undo`` takes the results of the parts, in order."""

    parts: list[Tensors]
    undo: Callable[[Sequence[Mapping[str, torch.Tensor]]], Tensors]


def pad(
    tensors: Mapping[str, torch.Tensor], *, left: int = 0, right: int = 0, fill: Mapping[str, float] | None = None
) -> Layout:
    """Add ``left`` and ``right`` positions along T, which hold ``fill[name]``, 0 (False) by default.

    Raises:
        ValueError: shapes differ, a width is negative, ``fill`` names no tensor, or an integer tensor gets no integer.
    """
    rows, length = _leading(tensors)
    fills = dict(fill or {})
    for name, width in (("left", left), ("right", right)):
        if width < 0:
            raise ValueError(f"{name}: expected an integer >= 0, got {width}")
    for name, value in fills.items():
        if name not in tensors:
            raise ValueError(f"fill: expected names among {', '.join(tensors)}, got {name!r}")
        if not tensors[name].is_floating_point() and not float(value).is_integer():
            raise ValueError(f"fill: expected an integer for {name}, got {value}")

    def widened(name: str, value: torch.Tensor) -> torch.Tensor:
        before, after = (value.new_full((rows, n, *value.shape[2:]), fills.get(name, 0)) for n in (left, right))
        return torch.cat((before, value, after), 1)

    def undo(results: Mapping[str, torch.Tensor]) -> Tensors:
        _expect(results, rows, left + length + right)
        return {name: value[:, left : left + length] for name, value in results.items()}

    return Layout({name: widened(name, value) for name, value in tensors.items()}, undo)


def permute(tensors: Mapping[str, torch.Tensor], order: Sequence[int] | torch.Tensor) -> Layout:
    """Reorder the sequences: row i of the layout is row ``order[i]``.

    Raises:
        ValueError: shapes differ, or ``order`` is not a permutation of ``range(B)``.
    """
    rows, _ = _leading(tensors)
    permutation = torch.as_tensor(order, device="cpu")
    if permutation.shape != (rows,) or not torch.equal(permutation.sort().values, torch.arange(rows)):
        raise ValueError(f"order: expected a permutation of range({rows}), got {permutation.tolist()}")
    back = permutation.argsort()

    def undo(results: Mapping[str, torch.Tensor]) -> Tensors:
        _expect(results, rows)
        return {name: value[back.to(value.device)] for name, value in results.items()}

    return Layout({name: value[permutation.to(value.device)] for name, value in tensors.items()}, undo)


def chunk(tensors: Mapping[str, torch.Tensor], cuts: Sequence[int], *, dim: int = 0) -> Chunks:
    """Cut sequences (``dim=0``) or positions (``dim=1``) before each index of ``cuts``, into ``len(cuts) + 1`` parts.

    Raises:
        ValueError: shapes differ, another dim, or cuts that are not strictly increasing inside the dim.
    """
    shape = _leading(tensors)
    if dim not in (0, 1):
        raise ValueError(f"dim: expected 0 or 1, got {dim}")
    bounds = [0, *cuts, shape[dim]]
    if any(low >= high for low, high in pairwise(bounds)):
        raise ValueError(f"cuts: expected strictly increasing indices inside (0, {shape[dim]}), got {list(cuts)}")
    sizes = [high - low for low, high in pairwise(bounds)]
    split = {name: value.split(sizes, dim) for name, value in tensors.items()}

    def undo(results: Sequence[Mapping[str, torch.Tensor]]) -> Tensors:
        if len(results) != len(sizes):
            raise ValueError(f"results: expected {len(sizes)} parts, got {len(results)}")
        for part, size in zip(results, sizes, strict=True):
            _expect(part, *((size, shape[1]) if dim == 0 else (shape[0], size)))
        return {name: torch.cat([part[name] for part in results], dim) for name in results[0]}

    return Chunks([{name: pieces[i] for name, pieces in split.items()} for i in range(len(sizes))], undo)


def pack(tensors: Mapping[str, torch.Tensor], mask: torch.Tensor) -> Packed:
    """Keep the positions where ``mask`` (bool ``[B, T]``) is True, one sequence after the other.

    ``undo`` gives ``[B, T, ...]`` with 0 (False) where the mask is False.

    Raises:
        ValueError: shapes differ, or the mask is not bool ``[B, T]``.
    """
    rows, length = _leading(tensors)
    if mask.dtype != torch.bool or mask.shape != (rows, length):
        raise ValueError(f"mask: expected bool {(rows, length)}, got {mask.dtype} {tuple(mask.shape)}")
    cu_seqlens = torch.zeros(rows + 1, dtype=torch.int32, device=mask.device)
    cu_seqlens[1:] = mask.sum(1).cumsum(0)
    total = int(cu_seqlens[-1])

    def undo(results: Mapping[str, torch.Tensor]) -> Tensors:
        _expect(results, total)
        empty = {name: value.new_zeros((rows, length, *value.shape[1:])) for name, value in results.items()}
        return {name: value.index_put((mask,), results[name]) for name, value in empty.items()}

    return Packed({name: value[mask] for name, value in tensors.items()}, undo, cu_seqlens)


def _leading(tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    if not tensors:
        raise ValueError("tensors: expected at least one, got none")
    first, shape = next((name, tuple(value.shape[:2])) for name, value in tensors.items())
    for name, value in tensors.items():
        if value.ndim < 2 or tuple(value.shape[:2]) != shape:
            raise ValueError(f"tensors: expected {name} of shape [B, T, ...] like {first}, got {tuple(value.shape)}")
    return shape[0], shape[1]


def _expect(results: Mapping[str, torch.Tensor], *leading: int) -> None:
    for name, value in results.items():
        if tuple(value.shape[: len(leading)]) != leading:
            raise ValueError(f"results: expected {name} of leading shape {leading}, got {tuple(value.shape)}")
