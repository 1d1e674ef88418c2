"""The backward pass of the GPU backends, as far as they share it: how it is cut into blocks.

dH is a canonical chain over the vocabulary, or over each of its segments; dW one over the tokens. For FP32 inputs the
chain of dH has spans of 256 columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rl_kernels.core.constants import BIAS_STEP
from rl_kernels.core.gpu import processors
from rl_kernels.core.rowwise.logp_gradient import LogpUpstream
from rl_kernels.linear_logp.backward import Steps, gradients
from rl_kernels.linear_logp.inputs import Inputs
from rl_kernels.linear_logp.vocabulary import BLOCK

LEAST_PIECE, LEAST_HEIGHT = 2048, 4096
"""Fewest columns and rows that backward processes at once, even beyond the workspace: fewer would be slow."""


def backward(
    steps: Steps,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    cap: torch.Tensor | None,
    norm: torch.Tensor,
    entropy: torch.Tensor | None,
    kept: torch.Tensor | None,
    grad_logp: torch.Tensor | None,
    grad_logsumexp: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    vocab_start: int,
    vocab_size: int,
    vocab_segments: int,
    partial: bool,
    workspace_mib: int | None,
    needed: Sequence[bool],
    join_tokens: int | None = None,
    main_grad: torch.Tensor | None = None,
    bias_total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dhidden, dweight, dbias), empty if not needed; what has a total is added to it instead."""
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap, vocab_start, vocab_size, kept)
    grads = (grad if grad is None else grad.contiguous() for grad in (grad_logp, grad_logsumexp, grad_entropy))
    upstream = LogpUpstream(target_ids, norm, entropy, *grads)
    sums = needed, join_tokens, main_grad, bias_total
    return gradients(steps, inputs, upstream, vocab_segments, partial, workspace_mib, *sums)


def ceil_div(n: int, d: int) -> int:
    """Return n / d, rounded up."""
    return -(-n // d)


def _piece(width: int, vocab: int, hidden: torch.Tensor) -> int:
    """Return the columns of a piece, at most ``width``: in whole rounds of tiles over the GPU, else pieces alike."""
    units = processors(hidden.get_device()) if hidden.is_cuda else 1
    # Tiles of 128 rows and 256 columns.
    rounds = units // math.gcd(units, ceil_div(hidden.shape[0], BIAS_STEP)) * BLOCK
    if units > 1 and rounds <= width < vocab:
        return width // rounds * rounds
    return ceil_div(ceil_div(vocab, ceil_div(vocab, width)), BLOCK) * BLOCK


class Blocks:
    """The blocks of the backward pass; dz and the two products are each backend's own."""

    def summed(self, hidden: torch.Tensor) -> int:
        """Return how many rows are summed into one term of dbias."""
        raise NotImplementedError

    def room(self, hidden: torch.Tensor, width: int) -> torch.Tensor:
        """Return room for dz; its rows are padded to whole blocks, so that TMA can address them for every width."""
        return hidden.new_empty((hidden.shape[0], ceil_div(width, BLOCK) * BLOCK))[:, :width]

    def cut(self, inputs: Inputs, workspace: int, needed: Sequence[bool], buffers: int = 0) -> tuple[int, int]:
        """Return (piece, height), multiples of 256 and 128; all rows at once if a piece of 2048 columns then fits."""
        (count, size), vocab = inputs.hidden.shape, inputs.weight.shape[0]
        # Besides dz, the workspace holds the row sums that are added into dbias.
        tile = self.summed(inputs.hidden)
        item, part = inputs.hidden.itemsize, 4 * needed[2]
        width = workspace // (count * item + ceil_div(count, tile) * part + 4 * size * buffers) // BLOCK * BLOCK
        if width >= min(vocab, LEAST_PIECE):
            return _piece(width, vocab, inputs.hidden), ceil_div(count, BIAS_STEP) * BIAS_STEP
        height = (workspace - 4 * LEAST_PIECE * size * max(buffers, 1)) * tile // (LEAST_PIECE * (item * tile + part))
        return LEAST_PIECE, max(height, LEAST_HEIGHT) // BIAS_STEP * BIAS_STEP
