"""The launches of a plan, alike in all backends with kernels: of a whole call, and of one that goes on from a cache."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from rl_kernels.core.calls import Launches
from rl_kernels.gated_delta.inputs import COUNT, Inputs
from rl_kernels.gated_delta.places import counts_of

NO_CACHE = (None,) * 6


class Plan(Protocol):
    """What a backend prepares for calls of one kind."""

    tokens: int
    is_empty: bool

    def run(self, arguments: tuple[Any, ...], state: torch.Tensor | None, cache: tuple[Any, ...]) -> torch.Tensor:
        """Launch the kernels, which write to ``state`` and the cache, and return the output."""


def whole(plan: Plan, inputs: Inputs, with_state: bool) -> Launches:
    """Return the launches of ``forward``: the output, and the states after the last tokens if they are asked for."""
    shape = inputs.state_shape

    def launch(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        v, initial = args[2], args[5]
        state = v.new_empty(shape if with_state else 0, dtype=torch.float32)
        if plan.is_empty:
            if with_state:
                state.zero_() if initial is None else state.copy_(initial)
            return v.new_zeros(v.shape), state
        return plan.run(args, state if with_state else None, NO_CACHE), state

    return launch


def pieces(plan: Plan) -> Launches:
    """Return the launches of ``continued``, which write to a cache: the output."""

    def launch(*args: Any) -> torch.Tensor:
        v, bounds, start = args[2], args[6], args[7]
        if plan.is_empty:
            return v.new_zeros(v.shape)
        cache = args[COUNT:]
        out = plan.run(args, cache[0], cache)
        cache[-1].add_(counts_of(plan.tokens, bounds, start))
        return out

    return launch
