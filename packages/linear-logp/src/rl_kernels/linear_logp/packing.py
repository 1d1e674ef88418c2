"""The softmax states of a shard and its selected logits in one tensor, which ranks exchange by one collective.

``packed[slots k + 1, N]``, in the compute dtype: k numbers (top, total, and with entropy weighted) for each unit of the
shard, then the logit of each row whose id is in the shard. ``slots`` is the number of units of a full shard, so it is
the same on all ranks; what a rank does not have is 0, and is not read.
"""

from __future__ import annotations

import torch

from rl_kernels.core.constants import UNIT
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.linear_logp.vocabulary import units

STATE = 3
"""Numbers of a state in the kernels' ``parts[unit, 3, N]``; the third is used only with entropy."""


def empty(hidden: torch.Tensor, slots: int, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a packed tensor of zeros for the rows of ``hidden``, and views: ``states[slots, k, N]``, ``chosen[N]``."""
    numbers, count = STATE if entropy else STATE - 1, hidden.shape[0]
    packed = hidden.new_zeros((slots * numbers + 1, count), dtype=compute_dtype(hidden.dtype))
    return packed, packed[:-1].view(slots, numbers, count), packed[-1]


def pack(hidden: torch.Tensor, slots: int, parts: torch.Tensor, chosen: torch.Tensor, *, entropy: bool) -> torch.Tensor:
    """Return the packed tensor of states ``parts[units, 3, N]`` and logits ``chosen[N]`` that kernels have written."""
    packed, states, kept = empty(hidden, slots, entropy=entropy)
    states[: len(parts)] = parts[:, : states.shape[1]]
    kept.copy_(chosen)
    return packed


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
