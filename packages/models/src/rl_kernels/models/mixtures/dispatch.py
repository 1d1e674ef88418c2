"""Experts that transformers cut over ranks, ``DistributedConfig(ep_size=...)``: their exchange is replaced by ours.

transformers puts a forward on the module that calls an object, its ``EPImplementation``, with the rows of this rank and
the ids of all experts. A swap gives that object another class, whose call is the forward of the swapped module.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from rl_kernels.models.mixtures.ranks import RANKS, ExpertRanks
from rl_kernels.models.swap import Undo

KNOWN, SWAPPED = ("AutoEP", "AllToAllEP"), "RowWise"
"""Classes of transformers that bring each token to its experts and its results back; prefix of those put on them."""


def is_cut(module: nn.Module) -> bool:
    """Say whether transformers cut the experts of a module over ranks."""
    return bool(getattr(module, "_is_expert_parallel", False))


def implementation_of(module: nn.Module) -> Any | None:
    """Return the object that exchanges the tokens of a module, or None if it is unknown or has tensor parallelism."""
    forward = vars(module).get("forward")
    if not inspect.isfunction(forward):
        return None
    found: Any = inspect.getclosurevars(forward).nonlocals.get("implementation")
    if type(found).__name__.removeprefix(SWAPPED) not in KNOWN or getattr(found, "megamoe", None) is not None:
        return None
    is_own = getattr(getattr(found, "experts_forward", None), "__self__", None) is module
    return found if is_own and found.tp_mesh.size() == 1 else None


def dispatch_swap(implementation: Any) -> Undo:
    """Let the forward of the module's class exchange tokens."""
    original, module = type(implementation), implementation.experts_forward.__self__
    group = implementation.ep_mesh.get_group()
    vars(module)[RANKS] = ExpertRanks(group, implementation.num_local_experts * implementation.ep_mesh.size())
    implementation.__class__ = type(f"{SWAPPED}{original.__name__}", (original,), {"__call__": _call})

    def undo(implementation: Any) -> None:
        implementation.__class__ = original
        vars(implementation.experts_forward.__self__).pop(RANKS, None)

    return undo


def _call(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    module = self.experts_forward.__self__
    return type(module).forward(module, hidden_states, top_k_index, top_k_weights)
