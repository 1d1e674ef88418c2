"""The arguments of a raw loss op by name, as ``api`` passes them and backends read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.grpo_loss.estimator import Estimator
from rl_kernels.grpo_loss.plan import Formula, Numbers


class LossCall(NamedTuple):
    """Arguments of ``forward`` and ``forward_grad`` in the order of their schema; ``op`` describes them."""

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
    normalizer: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    max_seqlen: int
    numbers: torch.Tensor
    plan: str
    estimator: str
    with_metrics: bool

    @property
    def values(self) -> Numbers:
        """The numbers of the loss by name."""
        return Numbers(*self.numbers.tolist())

    @property
    def formula(self) -> Formula:
        """The formula of the loss."""
        return Formula.parse(self.plan)

    @property
    def advantage_formula(self) -> Estimator:
        """The formula of the advantages."""
        return Estimator.parse(self.estimator)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the loss is computed."""
        return compute_dtype(self.current_logps.dtype)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.current_logps.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def length(self) -> int:
        """T: the padded length of a sequence."""
        return self.current_logps.shape[1] if self.cu_seqlens is None else self.max_seqlen
