"""The passes over chunks of the backward pass: the launches that recompute the chunks, ``replay`` and ``reverse``."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.operator import tiles_change_no_bit
from rl_kernels.gated_delta.backends.triton import reverse
from rl_kernels.gated_delta.backends.triton.plan import Plan, with_copies
from rl_kernels.gated_delta.backends.triton.schedule import tile_of_scan
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.inputs import COUNT, Inputs
from rl_kernels.gated_delta.triton_lib.backward import Chunks, launches_of


class Passes:
    """The launches for calls of one kind.

    Args:
        inputs: the arguments of forward.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.plan = plan = Plan(inputs, for_gradients=True)
        self.is_empty = plan.is_empty
        if self.is_empty:
            return
        self.slots, self.places, self.sizes = plan.slots, plan.places, plan.sizes
        self.strides: tuple[tuple[int, ...], tuple[int, ...]] = plan.strides
        _, _, size, value_size = plan.sizes
        tile = tile_of_scan(inputs.q.dtype, size, value_size, tiles_change_no_bit(inputs.q.device))
        self.parts = value_size // tile.width
        self.kept = self.parts * size
        self.replay = plan.over_chunks(reverse.replay, tile, *plan.v_strides)
        self.reverse = plan.over_chunks(reverse.reverse, tile)

    def readable(self, arguments: tuple[Any, ...]) -> Inputs:
        """Return the arguments of forward, with copies of what kernels cannot read."""
        return Inputs._make(with_copies(arguments, self.plan.copied))

    def run(
        self,
        inputs: Inputs,
        grad: torch.Tensor,
        grad_state: torch.Tensor | None,
        dv: torch.Tensor,
        initial: torch.Tensor | None,
    ) -> Chunks:
        """Launch, and write the gradients of v, and of the initial state unless it is None."""
        q, k, v, g, beta = inputs[:5]
        plan, slots, (_, heads, size, value_size) = self.plan, self.slots, self.sizes
        places = (inputs.cu_seqlens, inputs.start)
        unit_q, unit_k, sums, mixing, weights, inverse = plan.empty_chunks(q)
        plan.sum_decays(g, sums, None, *places, None)
        plan.normalize(q, k, unit_q, unit_k, None, *places, None)
        plan.prepare(unit_q, unit_k, beta, sums, mixing, weights, inverse, None, *places, None)
        states, dstates = (q.new_empty((slots, heads, size, value_size)) for _ in range(2))
        residuals = v.new_empty((slots, heads, CHUNK, value_size))
        kept = q.new_empty((slots, heads, self.parts, size), dtype=torch.float32)
        self.replay(unit_k, v, sums, weights, inputs.initial_state, states, residuals, *places)
        passed = (unit_q, unit_k, sums, mixing, weights, states, grad, grad_state)
        self.reverse(*passed, dstates, kept, dv, initial, *places, inputs.scale)
        return Chunks(unit_q, unit_k, sums, inverse, states, dstates, residuals, kept)


@prepared
def backward(*arguments: Any) -> Launches:
    """Return the gradients of q, k, v, g, beta, and of the initial state, empty unless it is asked for."""
    inputs, grad, needs_state = Inputs(*arguments[:COUNT]), arguments[COUNT], arguments[COUNT + 2]
    return launches_of(Passes(inputs), inputs, grad, needs_state)
