"""What the passes make room for: kept logits, states that ranks exchange, statistics, and blocks of dz on a GPU.

The forward pass keeps logits for the backward pass: those of the last columns, as many as fit. They are kept in the
compute dtype, capped and before the temperature, so backward computes with the numbers that it would recompute: how
many are kept changes no bit.

Ranks exchange the softmax states of a shard and its selected logits by one collective, as one tensor
``packed[slots k + 1, N]`` in the compute dtype: k numbers (top, total, and with entropy weighted) for each unit of the
shard, then the logit of each row whose id is in the shard. ``slots`` is the number of units of a full shard, so it is
the same on all ranks; what a rank does not have is 0, and is not read.

On a GPU dH is a canonical chain over the vocabulary, or over each of its segments; dW one over the tokens. For FP32
inputs the chain of dH has spans of 256 columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rl_kernels.core.constants import BIAS_STEP, UNIT
from rl_kernels.core.gpu import processors
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.linear_logp.inputs import Inputs
from rl_kernels.linear_logp.vocabulary import BLOCK, units

FEW = 64
"""Rows of which all logits are kept by default: their products take as long as reading the weight does."""
OF_CPU = 64
"""MiB of logits that are kept by default on a CPU, where products take long."""


STATE = 3
"""Numbers of a state in the kernels' ``parts[unit, 3, N]``; the third is used only with entropy."""
LEAST_PIECE, LEAST_HEIGHT = 2048, 4096
"""Fewest columns and rows that backward processes at once, even beyond the workspace: fewer would be slow."""


def kept_room(hidden: torch.Tensor, columns: int, saved_mib: int | None) -> torch.Tensor:
    """Return room for the kept logits of a weight with ``columns`` rows: ``[N, width]``, as ``width_of`` says."""
    width = kept_width(hidden, columns, saved_mib)
    return hidden.new_empty((hidden.shape[0], width), dtype=compute_dtype(hidden.dtype))


def kept_width(hidden: torch.Tensor, columns: int, saved_mib: int | None) -> int:
    """Return how many logits of a row are kept, of a weight with ``columns`` rows: at most ``saved_mib`` of all rows.

    With None all logits of at most 64 rows are kept; of more rows none, on a CPU at most 64 MiB. The first kept column
    is a multiple of 1024; the width is a multiple of 256, and 0 if nothing is kept.
    """
    count, dtype = hidden.shape[0], compute_dtype(hidden.dtype)
    width, padded = 0, -(-columns // BLOCK) * BLOCK
    if saved_mib is None and hidden.is_cpu and count > FEW:
        saved_mib = OF_CPU
    if saved_mib is None:
        width = padded if count <= FEW else 0
    elif saved_mib:
        room = (saved_mib << 20) // (max(count, 1) * dtype.itemsize)
        first = max(-(-(padded - room) // UNIT) * UNIT, 0)
        width = max(padded - first, 0)
    return width


def packed_room(hidden: torch.Tensor, slots: int, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a packed tensor of zeros for the rows of ``hidden``, and views: ``states[slots, k, N]``, ``chosen[N]``."""
    numbers, count = STATE if entropy else STATE - 1, hidden.shape[0]
    packed = hidden.new_zeros((slots * numbers + 1, count), dtype=compute_dtype(hidden.dtype))
    return packed, packed[:-1].view(slots, numbers, count), packed[-1]


def pack(hidden: torch.Tensor, slots: int, parts: torch.Tensor, chosen: torch.Tensor, *, entropy: bool) -> torch.Tensor:
    """Return the packed tensor of states ``parts[units, 3, N]`` and logits ``chosen[N]`` that kernels have written."""
    packed, states, kept = packed_room(hidden, slots, entropy=entropy)
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


def ceil_div(n: int, d: int) -> int:
    """Return n / d, rounded up."""
    return -(-n // d)


def _piece(width: int, columns: int, hidden: torch.Tensor) -> int:
    """Return the columns of a piece, at most ``width``: in whole rounds of tiles over the GPU, else pieces alike."""
    units = processors(hidden.get_device()) if hidden.is_cuda else 1
    # Tiles of 128 rows and 256 columns.
    rounds = units // math.gcd(units, ceil_div(hidden.shape[0], BIAS_STEP)) * BLOCK
    if units > 1 and rounds <= width < columns:
        return width // rounds * rounds
    return ceil_div(ceil_div(columns, ceil_div(columns, width)), BLOCK) * BLOCK


def statistics(like: torch.Tensor, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return room for (logp, norm, logsumexp, entropy) of the rows of ``like``; without entropy two are not written."""
    count = like.shape[0]
    logp, norm = like.new_empty(count, dtype=torch.float32), like.new_empty((count, 2), dtype=torch.float32)
    if not entropy:
        return logp, norm, logp, logp
    return logp, norm, like.new_empty(count, dtype=torch.float32), like.new_empty(count, dtype=torch.float32)


class Blocks:
    """The blocks of the backward pass; dz and the two products are each backend's own."""

    def summed(self, hidden: torch.Tensor) -> int:
        """Return how many rows are summed into one term of dbias."""
        raise NotImplementedError

    def begin(self, inputs: Inputs) -> Inputs:
        """Return the inputs in the layouts that the kernels read."""
        return inputs.contiguous()

    def room(self, hidden: torch.Tensor, width: int) -> torch.Tensor:
        """Return room for dz; its rows are padded to whole blocks, so that TMA can address them for every width."""
        padded = -(-width // BLOCK) * BLOCK
        dz = hidden.new_empty((hidden.shape[0], padded))
        return dz if padded == width else dz[:, :width]

    def cut(
        self, hidden: torch.Tensor, columns: int, workspace: int, needed: Sequence[bool], buffers: int = 0
    ) -> tuple[int, int]:
        """Return (piece, height), multiples of 256 and 128; all rows at once if a piece of 2048 columns then fits."""
        count, size = hidden.shape
        # Besides dz, the workspace holds the row sums that are added into dbias.
        tile = self.summed(hidden)
        item, part = hidden.itemsize, 4 * needed[2]
        width = workspace // (count * item + ceil_div(count, tile) * part + 4 * size * buffers) // BLOCK * BLOCK
        if width >= min(columns, LEAST_PIECE):
            return _piece(width, columns, hidden), ceil_div(count, BIAS_STEP) * BIAS_STEP
        height = (workspace - 4 * LEAST_PIECE * size * max(buffers, 1)) * tile // (LEAST_PIECE * (item * tile + part))
        return LEAST_PIECE, max(height, LEAST_HEIGHT) // BIAS_STEP * BIAS_STEP
