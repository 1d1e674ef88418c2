"""The policy as its FP32 master weights give it: a second model, which only measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_kernels.demo.gpu.rollout import decoded_logps, training_logps
from rl_kernels.demo.gpu.way import Way
from rl_kernels.demo.measures import Gap, gap
from rl_kernels.demo.rollout import Rollout


class MasterModel:
    """An FP32 model of the same sizes as the policy, and the masters that it takes its weights from."""

    def __init__(self, model: Any, masters: Sequence[torch.Tensor]) -> None:
        self.model = model.requires_grad_(False)
        self._masters = masters

    @torch.no_grad()
    def gap(self, rollout: Rollout, way: Way, shortest: int) -> Gap:
        """Decode a rollout's tokens with the weights of now, and compare with a training pass of the same weights."""
        torch._foreach_copy_(list(self.model.parameters()), list(self._masters))
        training = training_logps(self.model, rollout, way)
        return gap(decoded_logps(self.model, rollout, way, shortest), training, rollout.mask)
