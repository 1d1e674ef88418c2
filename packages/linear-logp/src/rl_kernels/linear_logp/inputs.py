"""The inputs of a call as the backends take them, cut into pieces of the vocabulary and blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from rl_kernels.linear_logp.vocabulary import BLOCK


class Cap(NamedTuple):
    """The cap of a logit x before the temperature: ``softcap tanh(rate x)``, with rate = logit_scale / softcap."""

    softcap: float
    rate: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Cap the logits ``x`` in place, and return them."""
        return x.mul_(self.rate).tanh_().mul_(self.softcap)

    def slope(self, y: torch.Tensor) -> torch.Tensor:
        """Return the derivative of capped logits ``y`` with respect to the logits before the cap."""
        return (1 - (y / self.softcap).square()).mul_(self.softcap * self.rate)


class Inputs(NamedTuple):
    """The inputs of a pass; weight and bias may be a shard of the vocabulary.

    Attributes:
        temperature: ``[]`` or ``[N]``; a backend may replace the former by a number.
        norm: ``[N, 2]`` of the backward pass, as entropy and the upstream gradients, ``[N]``.
        kept: logits of the last columns (``memory.kept_room``), or None.
        start: the shard's first column in the vocabulary; ids count from the first column of the vocabulary.
        vocab: columns of the vocabulary.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    target_ids: torch.Tensor
    bias: torch.Tensor | None
    temperature: Any
    ignore_index: int | None
    cap: Cap | None
    norm: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    grad_logp: torch.Tensor | None = None
    grad_logsumexp: torch.Tensor | None = None
    grad_entropy: torch.Tensor | None = None
    start: int = 0
    vocab: int = 0

    @property
    def first_kept(self) -> int:
        """The first column of the weight whose logits are kept; the number of columns if none are."""
        return first_kept(self.weight.shape[0], 0 if self.kept is None else self.kept.shape[1])

    def kept_part(self, columns: slice) -> torch.Tensor | None:
        """Return the logits ``[N, n]`` of columns that are all kept, or None for columns of which none is."""
        first = self.first_kept
        if self.kept is None or columns.start < first:
            return None
        return self.kept[:, columns.start - first : columns.stop - first]

    def block(self, rows: slice) -> Inputs:
        """Return the inputs of some of the rows."""
        if rows.start == 0 and rows.stop == self.hidden.shape[0]:
            return self
        scale = self.temperature
        per_row = isinstance(scale, torch.Tensor) and scale.ndim > 0
        of_rows = [None if value is None else value[rows] for value in self[7:13]]
        operands = self.hidden[rows], self.weight, self.target_ids[rows], self.bias
        return Inputs._make((*operands, scale[rows] if per_row else scale, *self[5:7], *of_rows, *self[13:]))

    def contiguous(self) -> Inputs:
        """Return the inputs with ids, temperatures and upstream gradients side by side; one temperature as a number."""
        logp, lse, entropy = self.grad_logp, self.grad_logsumexp, self.grad_entropy
        return self._replace(
            target_ids=self.target_ids.contiguous(),
            temperature=number_or_rows(self.temperature),
            grad_logp=None if logp is None else logp.contiguous(),
            grad_logsumexp=None if lse is None else lse.contiguous(),
            grad_entropy=None if entropy is None else entropy.contiguous(),
        )

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value[n]`` or ``value[n, k]`` with 0 at ignored positions."""
        if self.ignore_index is None:
            return value
        active = self.target_ids != self.ignore_index
        return torch.where(active if value.ndim == 1 else active[:, None], value, 0.0)


def number_or_rows(temperature: torch.Tensor) -> Any:
    """Return the temperature as kernels take it: a number, or one value per row side by side."""
    return temperature.contiguous() if temperature.ndim else float(temperature)


def cap_of(numbers: torch.Tensor | None) -> Cap | None:
    """Return the cap with these numbers."""
    return None if numbers is None else Cap(*numbers.tolist())


def first_kept(columns: int, width: int) -> int:
    """Return the first column that is kept, of ``columns``; ``columns`` if none is."""
    return -(-columns // BLOCK) * BLOCK - width if width else columns


def part_of(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return some rows of ``x``; all of them without a view, which costs host time."""
    return x if rows.start == 0 and rows.stop == x.shape[0] else x[rows]


def slices(count: int, width: int) -> Iterator[slice]:
    """Cut ``range(count)`` into slices of ``width``, the last one maybe shorter."""
    for start in range(0, count, width):
        yield slice(start, min(start + width, count))
