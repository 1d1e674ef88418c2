"""Blocks of a mixture whose own code depends on the batch: a shared expert behind a sigmoid, and noise in training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rl_kernels.models.activations import sigmoid
from rl_kernels.models.subclasses import subclass

SHARED = {"gate", "experts", "shared_expert", "shared_expert_gate"}
"""Children of a block of Qwen2-MoE, and of the families with its shared expert."""
NOISE = ("jitter_noise", "input_jitter_noise")
"""Attributes of a block that multiplies its rows by random numbers in training."""


def block(module: Any) -> tuple[type[nn.Module] | None, str] | None:
    """Return the class to swap in for a block of a mixture, None and the reason against it, or None alone."""
    children = dict(module.named_children()).keys()
    if "experts" not in children:
        return None
    if any(getattr(module, name, 0.0) for name in NOISE):
        return subclass(type(module), ("without noise",), _without_noise(type(module))), ""
    if children != SHARED:
        return None
    if not _adds_gated_expert(module):
        return None, f"{type(module).__name__} adds its shared expert in an unknown way"
    return subclass(type(module), (), _forward), ""


def _without_noise(kind: Any) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if self.training and any(getattr(self, name, 0.0) for name in NOISE):
            raise ValueError(
                f"{' or '.join(NOISE)}: expected 0 in training under invariant(): draws depend on the batch"
            )
        return kind.forward(self, hidden_states)

    return forward


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    shared = self.shared_expert(rows)
    _, weights, ids = self.gate(rows)
    out = add_gated(self.experts(rows, ids, weights), self.shared_expert_gate(rows), shared)
    return out.reshape(hidden_states.shape)


def add_gated(routed: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Return ``routed[T, D] + sigmoid(gate[T, 1]) * shared[T, D]``, with the bits of Qwen2-MoE's own code."""
    return routed + sigmoid(gate) * shared


def _adds_gated_expert(module: Any) -> bool:
    """Say whether a block computes ``experts + sigmoid(shared_expert_gate) * shared_expert``, by stand-ins for them."""
    probe = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    rows, twin = probe[0], copy.copy(module)
    twin.__dict__["_modules"] = {
        "gate": _Returns(lambda x: (x, x * 2, x * 3)),
        "experts": _Returns(lambda x, ids, weights: x + 5 * ids + 7 * weights),
        "shared_expert": _Returns(lambda x: x * 11),
        "shared_expert_gate": _Returns(lambda x: x[:, :1]),
    }
    expected = (1 + 5 * 3 + 7 * 2) * rows + rows[:, :1].sigmoid() * (rows * 11)
    try:
        with torch.no_grad():
            result = type(module).forward(twin, probe)
    except Exception:  # it takes more than rows
        return False
    return isinstance(result, torch.Tensor) and torch.allclose(result, expected[None])


class _Returns(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)
