"""Mixtures of experts in models of transformers: routers, experts, and the blocks that hold both.

``part`` recognizes a module of a mixture, and returns the class to swap in or the reason against it.
"""

from __future__ import annotations

from torch import nn

from rl_kernels.models.mixtures.blocks import block
from rl_kernels.models.mixtures.experts import experts_module, is_experts
from rl_kernels.models.mixtures.routers import is_router, router_module

__all__ = ["is_experts", "is_router", "part"]


def part(module: nn.Module) -> tuple[type[nn.Module] | None, str] | None:
    """Return the class to swap in, or None and the reason not to swap; None alone if it belongs to no mixture."""
    if is_experts(module):
        return experts_module(module)
    return router_module(module) if is_router(module) else block(module)
