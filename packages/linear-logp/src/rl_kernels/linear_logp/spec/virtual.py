"""A group of ranks in one process: the raw ops run for each shard in turn, and their results are merged as in a group.

So one machine can check the bits, and time the parts, of groups that it has no GPUs for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl_kernels.core.distributed import tree_sum
from rl_kernels.linear_logp.op import ops
from rl_kernels.linear_logp.vocabulary import slots, vocab_shards


class Call(NamedTuple):
    """The inputs of the raw ops for a whole vocabulary."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target_ids: torch.Tensor
    bias: torch.Tensor | None
    temperature: torch.Tensor
    ignore_index: int | None = None
    cap: torch.Tensor | None = None
    min_logit: torch.Tensor | None = None

    def shard(self, columns: tuple[int, int]) -> Call:
        """Return the inputs of the rank that has these columns."""
        part = slice(*columns)
        return self._replace(weight=self.weight[part], bias=None if self.bias is None else self.bias[part])


def states(call: Call, ranks: int, entropy: bool, backend: str) -> list[torch.Tensor]:
    """Return the packed states of each rank."""
    vocab = len(call.weight)
    height = slots(vocab, ranks)
    return [
        ops["states"](*call.shard(columns), columns[0], height, entropy, 0, backend)[0]
        for columns in vocab_shards(vocab, ranks)
    ]


def finish(call: Call, packed: Sequence[torch.Tensor], entropy: bool, backend: str) -> tuple[torch.Tensor, ...]:
    """Return (logp, logsumexp, entropy, norm) from the packed states of all ranks."""
    arguments = call.target_ids, call.temperature, call.ignore_index, len(call.weight)
    result: tuple[torch.Tensor, ...] = ops["finish"](torch.stack(list(packed)), *arguments, entropy, backend)
    return result


def backward(
    call: Call,
    ranks: int,
    saved: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    backend: str,
    workspace_mib: int = 256,
    join_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of hidden, weight and bias, each put together from those of all ranks.

    ``saved`` holds norm, entropy, no kept logits, and the upstream gradients of the three statistics.
    """
    vocab = len(call.weight)
    parts = [
        ops["backward"](
            *(*call.shard(columns), *saved, columns[0], vocab, 8, True, None),
            *(workspace_mib, list(needed), join_tokens, False, backend),
        )
        for columns in vocab_shards(vocab, ranks)
    ]
    dhidden, dweight, dbias = zip(*parts, strict=True)
    return tree_sum(dhidden).to(call.hidden.dtype), torch.cat(dweight), torch.cat(dbias)
