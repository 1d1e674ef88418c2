"""The ranks over which a model is cut, and whether tokens are cut too."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rl_kernels.core.distributed import group_of, group_rank, group_size

SEGMENTS = (2, 4, 8)
TOKENS = 1
"""The dim of hidden states ``[B, T, D]`` that holds tokens."""


class Ranks:
    """State that all modules of one parallel model share.

    Attributes:
        group: the process group, or None for one process.
        size: number of ranks.
        rank: rank of this process.
        segments: number of segments of a sum over a cut dim.
        cuts_tokens: whether the model was made with sequence parallelism.
        tokens_cut: whether the tokens of the last forward pass are cut: only if ``size`` divides their number.
            Activation checkpointing reads it when it recomputes layers.
    """

    def __init__(self, group: ProcessGroup | DeviceMesh | None, segments: int, cuts_tokens: bool) -> None:
        if segments not in SEGMENTS:
            raise ValueError(f"segments: expected 2, 4 or 8, got {segments!r}")
        self.group = None if group is None else group_of(group, "mesh")
        self.size = 1 if self.group is None else group_size(self.group)
        self.rank = 0 if self.group is None else group_rank(self.group)
        if segments % self.size:
            raise ValueError(f"segments: expected a multiple of the {self.size} ranks of mesh, got {segments}")
        self.segments = segments
        self.cuts_tokens = cuts_tokens and self.size > 1
        self.tokens_cut = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Return the same object: a copy of a model runs on the same ranks."""
        return self

    def __getstate__(self) -> Any:
        """Refuse a pickle of a parallel model: another process has other ranks."""
        raise TypeError(
            "parallelize: a parallel model cannot be pickled; save rl_kernels.models.parallel.full_state_dict(model)"
        )

    @property
    def scatter_dim(self) -> int | None:
        """The dim along which a result is cut over ranks in the forward pass that runs, or None."""
        return TOKENS if self.tokens_cut else None

    def part(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's part of a tensor that is cut evenly."""
        return x.chunk(self.size, dim)[self.rank]
