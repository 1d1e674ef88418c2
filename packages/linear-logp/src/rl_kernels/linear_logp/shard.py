"""The part of the vocabulary that this process has, and the passes over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.constants import UNIT
from rl_kernels.linear_logp.inputs import slices
from rl_kernels.linear_logp.op import ops
from rl_kernels.linear_logp.vocabulary import SEGMENTS, slots, vocab_shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rl_kernels.linear_logp.arguments import Call
    from rl_kernels.linear_logp.known import Known


ROWS = 16384
"""Rows whose states are exchanged at once: this bounds their memory."""


class Shard(NamedTuple):
    """The columns of this process, and how the gradient of hidden is summed.

    Attributes:
        start: the first column.
        size: columns of the whole vocabulary.
        segments: segments of the vocabulary, each a chain of its own: 1 or 8.
        group: ranks that have the other columns; None if this process has all of them.
    """

    start: int
    size: int
    segments: int
    group: ProcessGroup | None = None

    def slots(self, ranks: int) -> int:
        """Return the number of units of a full shard."""
        return slots(self.size, ranks)


def shard_of(
    columns: int,
    group: ProcessGroup | None,
    vocab_size: int | None,
    vocab_segments: int | None,
) -> Shard:
    """Return the shard of a weight with ``columns`` rows, or raise if it is not that of this rank.

    Raises:
        TypeError, ValueError: an argument does not fit the others; the message names it.
    """
    for name, value in (("vocab_size", vocab_size), ("vocab_segments", vocab_segments)):
        if value is not None:
            check.integer(name, value)
    if vocab_segments not in (None, 1, SEGMENTS):
        raise ValueError(f"vocab_segments: expected 1 or {SEGMENTS}, got {vocab_segments}")
    if group is None or group.size() == 1:
        return _whole(columns, vocab_size, vocab_segments or (1 if group is None else SEGMENTS))
    ranks = group.size()
    if vocab_segments == 1:
        raise ValueError(f"vocab_segments: expected {SEGMENTS} with a process_group of {ranks} ranks, got 1")
    if vocab_size is None:
        raise ValueError("vocab_size: expected the number of columns of the whole vocabulary with process_group")
    check.integer("vocab_size", vocab_size, least=1)
    start, stop = vocab_shards(vocab_size, ranks)[group.rank()]
    where = f"rank {group.rank()} of vocab_shards({vocab_size}, {ranks}) has columns {start} to {stop}"
    if columns != stop - start:
        raise ValueError(f"lm_head_weight: expected {stop - start} rows, got {columns}: {where}; {_advice(vocab_size)}")
    return Shard(start, vocab_size, SEGMENTS, group)


def _whole(columns: int, vocab_size: int | None, segments: int) -> Shard:
    alone = "where this process has the whole vocabulary"
    if columns == 0:
        raise ValueError("lm_head_weight: expected a vocabulary (first dim) of at least 1, got 0")
    if vocab_size not in (None, columns):
        raise ValueError(f"vocab_size: expected {columns} {alone}, got {vocab_size}; shards need process_group")
    return Shard(0, columns, segments)


def _advice(vocab: int) -> str:
    multiple = UNIT * SEGMENTS
    padded = -(-vocab // multiple) * multiple
    return (
        f"cut the weight by vocab_shards, or pad the vocabulary to a multiple of {multiple} ({padded}) and cut it "
        "evenly: leave the pad rows out of lm_head_weight, or count them in vocab_size and mask them by a bias of -inf"
    )


def same_of(
    hidden: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: float | torch.Tensor,
    known: Known | None,
    **options: object,
) -> dict[str, object]:
    """Return what must be equal on all ranks: name -> value. It reads all hidden states and ids."""
    from rl_kernels.core.distributed import fingerprint

    tensors = {"hidden": hidden, "target_ids": target_ids}
    if isinstance(temperature, torch.Tensor):
        tensors["temperature"] = temperature
    else:
        options["temperature"] = temperature
    if known is not None:
        tensors |= {f"known.{name}": value for name, value in known._asdict().items() if value is not None}
    names = {True: "is computed", False: "is not computed"}
    values: dict[str, object] = {"gradient of hidden": names[torch.is_grad_enabled() and hidden.requires_grad]}
    for name, value in tensors.items():
        values[name] = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    values |= options
    return values | {f"{name} (hash of its values)": fingerprint(value) for name, value in tensors.items()}


def forward_over_ranks(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call
) -> tuple[torch.Tensor, ...]:
    """Return what ``autograd.forward`` returns, of the shards of all ranks."""
    from rl_kernels.core.distributed import all_gather

    shard, backend, saved_mib, group = call.shard, call.ready.backend, call.saved_mib, call.shard.group
    assert group is not None
    ranks = group.size()
    slots = shard.slots(ranks)
    per_slice = []
    if saved_mib is None and hidden.shape[0] > ROWS:
        saved_mib = 0
    # At least one slice; only one if logits are kept, because joining those of several would copy them.
    count = max(hidden.shape[0], 1)
    for rows in slices(count, count if saved_mib or saved_mib is None else ROWS):
        part = call.of_rows(rows, saved_mib)
        rest = part.temperature, call.ignore_index
        inputs = hidden[rows], weight, part.target_ids, bias, *rest, call.cap
        packed, kept = ops["states"](*inputs, shard.start, slots, call.has_stats, saved_mib, backend)
        gathered = all_gather(packed, group).unflatten(0, (ranks, -1))
        per_slice.append(ops["finish"](gathered, part.target_ids, *rest, shard.size, call.has_stats, backend))
    logp, lse, entropy, norm = per_slice[0] if len(per_slice) == 1 else map(torch.cat, zip(*per_slice, strict=True))
    return (logp, lse, entropy, norm, kept) if call.has_stats else (logp, norm, kept)


def summed(name: str, group: ProcessGroup | None, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a raw op of the backward pass; in a group with the sum of the gradient of hidden over its ranks."""
    op = ops[name]
    if group is None:
        return op
    from rl_kernels.core.distributed import all_reduce

    def call(*args: Any) -> Any:
        partial, *gradients = op(*args)
        needed = args[-3 if name == "backward" else -5]
        return all_reduce(partial, group, dtype=dtype) if needed[0] else partial, *gradients

    call.__name__ = op.__name__
    return call
