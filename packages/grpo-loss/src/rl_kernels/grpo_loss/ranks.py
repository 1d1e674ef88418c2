"""The batch of all ranks of a process group: its sequences, and the exchange of their sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rl_kernels.core import validate as check
from rl_kernels.core.distributed import agree, all_gather, fingerprint, group_of, group_rank, group_size
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.extras import Normalizer
from rl_kernels.grpo_loss.objective import Objective
from rl_kernels.grpo_loss.op import ops

T = TypeVar("T")
Grouping = tuple[int | None, Sequence[int] | torch.Tensor | None]
"""``samples_per_prompt`` and ``group_boundaries``."""


class Sizes(NamedTuple):
    """Number of sequences, and T: the padded length of a sequence."""

    batch: int
    length: int


class Batch(NamedTuple):
    """The sequences of all ranks, in the order of ranks.

    Attributes:
        group: process group of the ranks.
        counts: number of sequences of each rank.
        length: T of the longest rank.
    """

    group: ProcessGroup
    counts: tuple[int, ...]
    length: int

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x[..., B]`` of all ranks side by side."""
        most = max(self.counts)
        if not most:
            return x
        parts = all_gather(F.pad(x, (0, most - x.shape[-1]))[None], self.group)
        return torch.cat([part[..., :count] for part, count in zip(parts, self.counts, strict=True)], -1)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of this rank's sequences of ``x[B]``, one for each sequence of the batch."""
        rank = group_rank(self.group)
        return x[sum(self.counts[:rank]) :][: self.counts[rank]]


def agreed(
    name: str,
    process_group: ProcessGroup | DeviceMesh | None,
    check_here: Callable[[bool], tuple[T, Sizes, Mapping[str, object]]],
    validate: bool,
) -> tuple[T, Batch]:
    """Check a call on all ranks; return the result of ``check_here``, and the batch.

    Args:
        name: name of the public function.
        process_group: process group of the call.
        check_here: checks this rank's arguments; returns a result, the sizes, and the values that must be equal on all
            ranks. These are read only if it is passed True, because reading values of tensors syncs with a GPU.
        validate: False, and graph capture, skips the exchange: sizes are taken to be equal on all ranks.

    Raises:
        TypeError, ValueError: arguments of a rank are wrong, or ranks differ; the same error on each.
    """
    group = group_of(process_group, sizes=None)
    if not validate or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        result, sizes, _ = check_here(False)
        return result, Batch(group, (sizes.batch,) * group_size(group), sizes.length)
    try:
        result, sizes, shared = check_here(True)
    except Exception as error:
        agree(name, group, error, {})
        raise
    by_rank = [Sizes(**one) for one in agree(name, group, None, shared, sizes._asdict())]
    return result, Batch(group, tuple(one.batch for one in by_rank), max(one.length for one in by_rank))


def combined(batch: Batch, sums: torch.Tensor, call: LossCall, backend: str) -> tuple[torch.Tensor, ...]:
    """Return (loss, policy_loss, kl, metrics, divisor) of a batch, from the sums of this rank's sequences."""
    all_sums = batch.gathered(sums)
    return ops["combine"](all_sums, call.normalizer, batch.length, call.numbers, call.plan, backend)


def shared_options(objective: Objective, normalizer: Normalizer) -> dict[str, object]:
    """Return the options of a call, which must be equal on all ranks."""
    values = {option.name: getattr(objective, option.name) for option in fields(objective) if option.init}
    return values | {name: _shown(value) for name, value in normalizer._asdict().items()}


def shared_kinds(inputs: LossCall) -> dict[str, object]:
    """Return dtypes and numbers of dims: ranks that differ in them would not compute what one process does."""
    kinds: dict[str, object] = {}
    for name in ("current_logps", "old_logps", "ref_logps"):
        value = getattr(inputs, name)
        kinds[name] = "None" if value is None else value.dtype
    scores = inputs.advantages if inputs.rewards is None else inputs.rewards
    assert scores is not None
    kinds["rewards or advantages"] = f"{scores.dtype}, {scores.ndim} dims"
    for name in ("rollout_ratio", "entropy", "cu_seqlens"):
        value = getattr(inputs, name)
        kinds[name] = "None" if value is None else f"{value.ndim} dims"
    return kinds


def shared_groups(grouping: Grouping) -> dict[str, object]:
    """Return the groups of the rewards of all ranks."""
    samples, boundaries = grouping
    return {"samples_per_prompt": samples, "group_boundaries": _shown(boundaries)}


def _shown(value: object) -> object:
    """Return the form of a value that ranks compare: for a tensor its dtype, shape and a fingerprint of its bits."""
    if isinstance(value, torch.Tensor) and value.dtype in (*check.INTEGERS, *check.FLOATS):
        return f"a tensor of {value.dtype} {tuple(value.shape)}, bits {fingerprint(value):x}"
    return value
