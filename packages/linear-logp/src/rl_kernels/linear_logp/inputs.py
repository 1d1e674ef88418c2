"""The inputs of a call, cut into pieces of the vocabulary and blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from rl_kernels.linear_logp.kept import first_kept


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
    """The inputs of a call, as the raw ops take them; weight and bias may be a shard of the vocabulary.

    Attributes:
        start: the shard's first column in the vocabulary; ids count from the first column of the vocabulary.
        whole: columns of the vocabulary; None if weight has them all.
        kept: logits of the last columns (``kept.empty``), or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    target_ids: torch.Tensor
    bias: torch.Tensor | None
    temperature: torch.Tensor
    ignore_index: int | None
    cap_numbers: torch.Tensor | None
    start: int = 0
    whole: int | None = None
    kept: torch.Tensor | None = None

    @property
    def vocab(self) -> int:
        """The number of columns of the vocabulary."""
        return self.weight.shape[0] if self.whole is None else self.whole

    @property
    def cap(self) -> Cap | None:
        """The cap of the logits, or None."""
        return None if self.cap_numbers is None else Cap(*self.cap_numbers.tolist())

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
        temperature = self.temperature[rows] if self.temperature.ndim else self.temperature
        kept = None if self.kept is None else self.kept[rows]
        return self._replace(
            hidden=self.hidden[rows], target_ids=self.target_ids[rows], temperature=temperature, kept=kept
        )

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value[n]`` or ``value[n, k]`` with 0 at ignored positions."""
        if self.ignore_index is None:
            return value
        active = self.target_ids != self.ignore_index
        return torch.where(active if value.ndim == 1 else active[:, None], value, 0.0)


def slices(count: int, width: int) -> Iterator[slice]:
    """Cut ``range(count)`` into slices of ``width``, the last one maybe shorter."""
    for start in range(0, count, width):
        yield slice(start, min(start + width, count))
