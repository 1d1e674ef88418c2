"""Hybrid models of transformers: Gated DeltaNet layers beside full attention whose output has a gate.

``part`` recognizes a module of a hybrid, and returns the class to swap in or the reason against it.
"""

from __future__ import annotations

from torch import nn

from rl_kernels.models.hybrids.attention import gated_attention, is_gated_attention
from rl_kernels.models.hybrids.delta_net import CONVOLUTION, delta_net, is_delta_net

__all__ = ["is_part_of_delta_net", "part"]


def part(module: nn.Module) -> tuple[type[nn.Module] | None, str] | None:
    """Return the class to swap in, or None and the reason not to swap; None alone if it belongs to no hybrid."""
    if is_delta_net(module):
        return delta_net(module)
    return gated_attention(module) if is_gated_attention(module) else None


def is_part_of_delta_net(name: str, parent: nn.Module | None) -> bool:
    """Say whether a child ``name`` is computed by its parent, a swapped Gated DeltaNet."""
    return name == CONVOLUTION and parent is not None and is_delta_net(parent)
