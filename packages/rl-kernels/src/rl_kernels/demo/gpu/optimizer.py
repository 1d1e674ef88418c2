"""AdamW on FP32 copies of BF16 weights, whose last bits are too coarse for the updates of a small learning rate."""

from __future__ import annotations

from collections.abc import Iterable

import torch

LARGEST_NORM = 1.0
"""To which the norm of all gradients together is clipped."""


class MasterAdamW:
    """Steps on FP32 masters, which are then rounded into the weights of the model."""

    def __init__(self, weights: Iterable[torch.nn.Parameter]) -> None:
        self.weights: list[torch.Tensor] = list(weights)
        self.masters: list[torch.Tensor] = [torch.nn.Parameter(weight.detach().float()) for weight in self.weights]
        self._adam = torch.optim.AdamW(self.masters, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, learning_rate: float) -> None:
        """Take the gradients from the weights, clip them, and step."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, LARGEST_NORM)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        for master in self.masters:
            master.grad = None
