"""The inputs of a pass as backends take them, and what passes make room for: statistics, states, kept logits.

The forward pass keeps logits for the backward pass: those of the last columns, as many as fit. They are kept in the
compute dtype, capped and before the temperature, so backward computes with the numbers that it would recompute: how
many are kept changes no bit.

Ranks exchange the softmax states of a shard and its selected logits by one collective, as one tensor
``packed[slots k + 1, N]`` in the compute dtype: k numbers (top, total, and with entropy weighted) for each unit of the
shard, then the logit of each row whose id is in the shard. ``slots`` is the number of units of a full shard, so it is
the same on all ranks; what a rank does not have is 0, and is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from rl_kernels.core.constants import UNIT
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.linear_logp.vocabulary import BLOCK, units

FEW = 64
"""Rows of which all logits are kept by default: their products take as long as reading the weight does."""
OF_CPU = 64
"""MiB of logits that are kept by default on a CPU, where products take long."""
STATE = 3
"""Numbers of a state in the kernels' ``parts[unit, 3, N]``; the third is used only with entropy."""


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
        min_logit: ``[N]``, or None: logits after temperature that are below it count as -inf.
        norm: ``[N, 2]`` of the backward pass, as entropy and the upstream gradients, ``[N]``.
        kept: logits of the last columns (``kept_room``), or None.
        start: the shard's first column in the vocabulary; ids count from the first column of the vocabulary.
        vocab: columns of the vocabulary.
        columns: ``[N, K]``: the columns of each row that count (``kept_columns.py``), or None for all.
        dz: ``[N, K]``, that of the columns.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    target_ids: torch.Tensor
    bias: torch.Tensor | None
    temperature: Any
    ignore_index: int | None
    cap: Cap | None
    min_logit: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    grad_logp: torch.Tensor | None = None
    grad_logsumexp: torch.Tensor | None = None
    grad_entropy: torch.Tensor | None = None
    start: int = 0
    vocab: int = 0
    columns: torch.Tensor | None = None
    dz: torch.Tensor | None = None

    @property
    def first_kept(self) -> int:
        """The first column of the weight whose logits are kept; the number of columns if none are."""
        return first_kept(self.weight.shape[0], 0 if self.kept is None else self.kept.shape[1])

    def kept_part(self, columns: slice) -> torch.Tensor | None:
        """Return the logits ``[N, n]`` of columns that are all kept, or None for columns of which none is."""
        if self.kept is None or columns.start < (first := self.first_kept):
            return None
        return self.kept[:, columns.start - first : columns.stop - first]

    def block(self, rows: slice) -> Inputs:
        """Return the inputs of some of the rows."""
        if rows.start == 0 and rows.stop == self.hidden.shape[0]:
            return self
        scale = self.temperature
        per_row = isinstance(scale, torch.Tensor) and scale.ndim > 0
        of_rows, over_columns = [
            [None if value is None else value[rows] for value in part] for part in (self[7:14], self[16:])
        ]
        operands = self.hidden[rows], self.weight, self.target_ids[rows], self.bias
        return Inputs._make(
            (*operands, scale[rows] if per_row else scale, *self[5:7], *of_rows, *self[14:16], *over_columns)
        )

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value[n]`` or ``value[n, k]`` with 0 at ignored positions."""
        if self.ignore_index is None:
            return value
        active = self.target_ids != self.ignore_index
        return torch.where(active if value.ndim == 1 else active[:, None], value, 0.0)


def inputs_of(args: Any, **more: Any) -> Inputs:
    """Return the inputs of a pass: the first 8 arguments of its raw op, of the backward pass the first 16."""
    fields: Any = (*args[:6], cap_of(args[6]), *args[7:])
    return Inputs(*fields, **more)


def rows_of(hidden: torch.Tensor) -> torch.Tensor:
    """Return hidden states ``[..., D]`` as ``[N, D]``."""
    return hidden if hidden.ndim == 2 else hidden.flatten(0, -2) if hidden.ndim > 1 else hidden[None]


def flat(target_ids: torch.Tensor) -> torch.Tensor:
    """Return ids ``[...]`` as ``[N]``; without a call of PyTorch, which costs host time, if they are."""
    return target_ids if target_ids.ndim == 1 else target_ids.reshape(-1)


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


def kept_width(hidden: torch.Tensor, columns: int, saved_mib: int | None) -> int:
    """Return how many logits of a row are kept, of a weight with ``columns`` rows: at most ``saved_mib`` of all rows.

    With None all logits of at most 64 rows are kept; of more rows none, on a CPU at most 64 MiB. The first kept column
    is a multiple of 1024; the width is a multiple of 256, and 0 if nothing is kept.
    """
    count, padded = hidden.shape[0], -(-columns // BLOCK) * BLOCK
    if saved_mib is None and hidden.is_cpu and count > FEW:
        saved_mib = OF_CPU
    if saved_mib is None:
        return padded if count <= FEW else 0
    if not saved_mib:
        return 0
    room = (saved_mib << 20) // (max(count, 1) * compute_dtype(hidden.dtype).itemsize)
    first = max(-(-(padded - room) // UNIT) * UNIT, 0)
    return max(padded - first, 0)


def kept_room(hidden: torch.Tensor, columns: int, saved_mib: int | None) -> torch.Tensor:
    """Return room for the kept logits of a weight with ``columns`` rows: ``[N, kept_width]`` in the compute dtype."""
    width = kept_width(hidden, columns, saved_mib)
    return hidden.new_empty((hidden.shape[0], width), dtype=compute_dtype(hidden.dtype))


def packed_room(hidden: torch.Tensor, slots: int, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a packed tensor of zeros for the rows of ``hidden``, and views: ``states[slots, k, N]``, ``chosen[N]``."""
    numbers, count = STATE if entropy else STATE - 1, hidden.shape[0]
    packed = hidden.new_zeros((slots * numbers + 1, count), dtype=compute_dtype(hidden.dtype))
    return packed, packed[:-1].view(slots, numbers, count), packed[-1]


def totals_of(gathered: torch.Tensor, *, entropy: bool) -> torch.Tensor:
    """Return the totals of each row's states ``[N]``, added: NaN where logits are, 0 where none is kept."""
    return gathered[:, 1 : -1 : STATE if entropy else STATE - 1].sum((0, 1))


def unpacked(
    gathered: torch.Tensor, target_ids: torch.Tensor, vocab_size: int, *, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``parts[units, 3, N]`` in the order of the vocabulary, and the logit that each row selects ``[N]``.

    Args:
        gathered: ``[ranks, slots k + 1, N]``, the packed tensors of all ranks in order.
        target_ids: ``[N]``, any values; the logit of a row whose id is not a column is arbitrary.
        vocab_size: columns of the whole vocabulary.
        entropy: whether states have their third number.
    """
    ranks, height, count = gathered.shape
    numbers = STATE if entropy else STATE - 1
    slots = (height - 1) // numbers
    states = gathered[:, :-1].unflatten(1, (slots, numbers)).flatten(0, 1)[: units(vocab_size)]
    parts = gathered.new_empty((len(states), STATE, count))
    parts[:, :numbers] = states
    if ranks == 1:
        return parts, gathered[0, -1]
    owner = (target_ids.long() // (slots * UNIT)).clamp(0, ranks - 1)
    return parts, gathered[:, -1].gather(0, owner[None])[0]
