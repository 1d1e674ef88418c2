"""How a twin computes: the same four things, once through the operators and once in stock PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor


@dataclass(frozen=True)
class Way:
    """One way to compute; two of them differ in rounding alone.

    Attributes:
        name: as reports call it.
        taken: ``(model) -> context``, in which the model computes in this way.
        draw: ``(head, hidden[B, D], noise[B, V]) -> (ids[B], logps[B])``: the tokens that exponential noise chooses in
            proportion to their probabilities, and their log-probabilities, FP32.
        logps: ``(head, hidden[B, T, D], targets[B, T]) -> [B, T]``, FP32, of the targets; 0 where they are ``IGNORE``.
        loss: ``(current[B, T], old[B, T], rewards[B], mask[B, T], samples_per_prompt, clip_eps) -> []``, GRPO's clipped
            policy loss, a mean over the sampled tokens; ``current`` carries the gradient.
    """

    name: str
    taken: Callable[[nn.Module], AbstractContextManager[Any]]
    draw: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
    logps: Callable[[nn.Module, Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


def race(logits: Tensor, noise: Tensor) -> Tensor:
    """Return the ids that are drawn from ``softmax(logits[B, V])`` with ``noise[B, V]`` of unit exponential draws.

    The id whose time, its noise over its probability, is the least: the host waits for nothing, as it would in
    ``torch.multinomial``.
    """
    return (logits - noise.log()).argmax(-1)
