"""The whole weights of a parallel model: gather them from all ranks, and load them into shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from rl_kernels.core.distributed import all_gather
from rl_kernels.linear_logp import vocab_shards
from rl_kernels.models.parallel.layers import SHARED, VocabParallelHead
from rl_kernels.models.parallel.ranks import Ranks
from rl_kernels.models.parallel.styles import CUT, shards_allowed


class Cut(NamedTuple):
    """The cut of a parameter along ``dim``: ``spans`` has the (start, stop) of each rank."""

    ranks: Ranks
    dim: int
    spans: tuple[tuple[int, int], ...]


def cuts_of(model: nn.Module) -> Iterator[tuple[str, Cut]]:
    """Yield the name and the cut of each parameter that is cut."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, (dim, whole) in getattr(module, CUT, {}).items():
            ranks: Ranks = getattr(module, SHARED)
            if isinstance(module, VocabParallelHead):
                spans = vocab_shards(whole, ranks.size)
            else:
                size = whole // ranks.size
                spans = tuple((size * rank, size * (rank + 1)) for rank in range(ranks.size))
            yield f"{prefix}.{name}" if prefix else name, Cut(ranks, dim, spans)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the ``state_dict`` of the model before it was cut, on each rank; all ranks must call it.

    Tensors that are not cut are the model's own, not copies.
    """
    cuts = dict(cuts_of(model))
    with shards_allowed():
        state = model.state_dict()
    return {name: gathered(value, cuts[name]) if name in cuts else value for name, value in state.items()}


def gathered(part: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Gather a parameter, or its gradient, from the parts of all ranks; return the whole."""
    if cut.ranks.group is None or cut.ranks.size == 1:
        return part
    widths = [stop - start for start, stop in cut.spans]
    missing = max(widths) - part.shape[cut.dim]
    padded = F.pad(part, [0, 0] * (part.ndim - 1 - cut.dim) + [0, missing])
    return all_gather(padded, cut.ranks.group, cut.dim).narrow(cut.dim, 0, sum(widths))


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load the whole weights of a model into its shards; each rank passes all weights.

    Raises:
        RuntimeError: names or shapes do not fit, as in ``load_state_dict``.
        ValueError: a weight has another size along the dim that is cut.
    """
    cuts = dict(cuts_of(model))
    parts = dict(state)
    for name, cut in cuts.items():
        if name not in parts:
            continue
        start, stop = cut.spans[cut.ranks.rank]
        if parts[name].shape[cut.dim] != sum(stop - start for start, stop in cut.spans):
            raise ValueError(f"{name}: expected the whole weight, got shape {tuple(parts[name].shape)}")
        parts[name] = parts[name].narrow(cut.dim, start, stop - start)
    model.load_state_dict(parts)
