"""Mixtures of experts in models of transformers: routers, experts, and the blocks that hold both.

``part`` recognizes a module of a mixture, and returns the class to swap in or the reason against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rl_kernels.models.mixtures.blocks import block
from rl_kernels.models.mixtures.dispatch import dispatch_swap, implementation_of, is_cut
from rl_kernels.models.mixtures.experts import experts_module, is_experts
from rl_kernels.models.mixtures.replay import LAYER, Replay, watch
from rl_kernels.models.mixtures.routers import can_replay, is_router, router_module
from rl_kernels.models.swap import SWAPPED

__all__ = ["Replay", "dispatch_swap", "implementation_of", "is_cut", "is_experts", "is_router", "part", "replaying"]


def part(module: nn.Module) -> tuple[type[nn.Module] | None, str] | None:
    """Return the class to swap in, or None and the reason not to swap; None alone if it belongs to no mixture."""
    if is_experts(module):
        return experts_module(module)
    return router_module(module) if is_router(module) else block(module)


def replaying(model: nn.Module, runner: Any, routes: Sequence[torch.Tensor]) -> tuple[Replay, Callable[[], None]]:
    """Replay recorded routes in the swapped routers of a model; return the replay, and a function that ends it.

    Args:
        model: the model whose routers were swapped.
        runner: the ``PreTrainedModel`` in it, whose calls begin a pass.
        routes: as in ``Replay.set``.
    """
    routers = [module for module in model.modules() if is_router(module)]
    unable = [
        type(module).__name__ for module in routers if not (hasattr(type(module), SWAPPED) and can_replay(module))
    ]
    if not routers or unable or runner is None:
        what = f"a {unable[0]}" if unable else "a model without routers of transformers"
        raise ValueError(f"routes: cannot be replayed in {what}")
    replay = Replay(routers)
    replay.set(routes)
    for module, layer in zip(routers, replay.layers, strict=True):
        vars(module)[LAYER] = layer
    unwatch = watch(runner, replay)

    def end() -> None:
        unwatch()
        for module in routers:
            vars(module).pop(LAYER, None)

    return replay, end
