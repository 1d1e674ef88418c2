"""The arguments of a raw loss op, named: what ``api`` passes on and backends read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.rowwise import compute_dtype
from rl_kernels.grpo_loss.estimator import Estimator
from rl_kernels.grpo_loss.plan import Numbers, Plan


class LossCall(NamedTuple):
    """Arguments of ``forward`` and ``forward_grad`` in the order of their schema, which ``op`` describes."""

    current_logps: torch.Tensor
    old_logps: torch.Tensor | None
    ref_logps: torch.Tensor | None
    rewards: torch.Tensor | None
    boundaries: torch.Tensor | None
    samples: int
    advantages: torch.Tensor | None
    mask: torch.Tensor
    rollout_ratio: torch.Tensor | None
    entropy: torch.Tensor | None
    normaliser: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    max_seqlen: int
    numbers: torch.Tensor
    plan: str
    estimator: str
    with_metrics: bool

    @property
    def values(self) -> Numbers:
        """The numbers by name."""
        return Numbers(*self.numbers.tolist())

    @property
    def formula(self) -> Plan:
        """What is computed."""
        return Plan.parse(self.plan)

    @property
    def advantage_formula(self) -> Estimator:
        """How advantages come from rewards."""
        return Estimator.parse(self.estimator)

    @property
    def dtype(self) -> torch.dtype:
        """In which the loss is worked out."""
        return compute_dtype(self.current_logps.dtype)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.current_logps.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def length(self) -> int:
        """Tokens that the longest sequence has room for."""
        return self.current_logps.shape[1] if self.cu_seqlens is None else self.max_seqlen
