"""The launches of the backward pass.

The chunks are computed again: products and inverses, the states at their starts, and the residuals. Then a pass over
chunks in descending order, and three launches for all chunks at once: systems, queries and keys.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of
from rl_kernels.core.operator import tiles_change_no_bit
from rl_kernels.core.triton_lib.launch import Launch
from rl_kernels.gated_delta.backends.triton import differentiate, reverse
from rl_kernels.gated_delta.backends.triton.plan import Plan, with_copies
from rl_kernels.gated_delta.backends.triton.schedule import tile_of_differentiate, tile_of_scan
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.inputs import COUNT, Inputs


class Backward:
    """The launches for calls of one kind, which have tokens.

    Args:
        inputs: the arguments of forward.
        plan: the launches of forward.
    """

    def __init__(self, inputs: Inputs, plan: Plan) -> None:
        self.plan = plan
        key_heads, heads, size, value_size = sizes = plan.sizes
        q_strides, k_strides, v_strides = plan.strides
        fast = tiles_change_no_bit(inputs.q.device)
        tile = tile_of_scan(inputs.q.dtype, size, value_size, fast)
        width, warps, stages = tile_of_differentiate(inputs.q.dtype, size, value_size, fast)
        self.parts = value_size // tile.width

        def of_chunks(kernel: Any, heads: int, *numbers: Any) -> Launch:
            numbers = (*plan.places, *numbers)
            return Launch(kernel, (plan.slots, heads), numbers, num_warps=warps, num_stages=stages)

        self.replay = plan.over_chunks(reverse.replay, tile, *v_strides)
        self.reverse = plan.over_chunks(reverse.reverse, tile)
        self.systems = of_chunks(differentiate.systems, heads, *sizes, width)
        normalize = inputs.normalize_qk
        self.queries = of_chunks(differentiate.queries, key_heads, *q_strides, *sizes, width, normalize)
        numbers = (*sizes, width, self.parts * size, normalize)
        self.keys = of_chunks(differentiate.keys, key_heads, *k_strides, *numbers)

    def run(
        self,
        inputs: Inputs,
        grad: torch.Tensor,
        grad_state: torch.Tensor | None,
        results: list[torch.Tensor],
        initial: torch.Tensor | None,
    ) -> None:
        """Launch, and write ``results``, the gradients of q, k, v, g and beta, and that of the initial state."""
        plan, (q, k, v, g, beta) = self.plan, inputs[:5]
        dq, dk, dv, dg, dbeta = results
        slots, (_, heads, size, value_size) = plan.slots, plan.sizes
        places, scale = (inputs.cu_seqlens, inputs.start), inputs.scale
        unit_q, unit_k, sums, mixing, weights, inverse = plan.empty_chunks(q)
        plan.sum_decays(g, sums, None, *places, None)
        plan.normalize(q, k, unit_q, unit_k, None, *places, None)
        plan.prepare(unit_q, unit_k, beta, sums, mixing, weights, inverse, None, *places, None)
        states, dstates = (q.new_empty((slots, heads, size, value_size)) for _ in range(2))
        residuals = v.new_empty((slots, heads, CHUNK, value_size))
        kept = q.new_empty((slots, heads, self.parts, size), dtype=torch.float32)
        self.replay(unit_k, v, sums, weights, inputs.initial_state, states, residuals, *places)
        passed = (unit_q, unit_k, sums, mixing, weights, states, grad, grad_state)
        self.reverse(*passed, dstates, kept, dv, initial, *places, scale)
        dqk, dkk, dfaded = torch.empty_like(mixing), torch.empty_like(mixing), torch.empty_like(weights)
        products = (dqk, dkk, dfaded)
        self.systems(unit_q, unit_k, beta, sums, inverse, dstates, residuals, grad, *products, dbeta, *places, scale)
        moved = torch.empty_like(sums)
        self.queries(q, unit_q, unit_k, sums, states, grad, dqk, moved, dq, *places, scale)
        self.keys(k, unit_q, unit_k, sums, states, dv, *products, moved, kept, dk, dg, *places)


@prepared
def backward(*arguments: Any) -> Launches:
    """Return the gradients of q, k, v, g, beta, and of the initial state, empty unless it is asked for."""
    inputs, needs_state = Inputs(*arguments[:COUNT]), arguments[COUNT + 2]
    plan, shape = Plan(inputs, for_gradients=True), inputs.state_shape
    launches = None if plan.is_empty else Backward(inputs, plan)

    def launch(*args: Any) -> tuple[torch.Tensor, ...]:
        call, (grad, grad_state) = Inputs._make(with_copies(args[:COUNT], plan.copied)), args[COUNT : COUNT + 2]
        grad_state = None if grad_state is None else grad_state.contiguous()
        # Tokens of padding have no gradient.
        is_padded = launches is None or call.start is not None
        results = [x.new_zeros(x.shape) if is_padded else x.new_empty(x.shape) for x in call[:5]]
        initial = call.v.new_empty(shape if needs_state else 0, dtype=torch.float32)
        if launches is not None:
            with device_of(call.q):
                launches.run(call, grad.contiguous(), grad_state, results, initial if needs_state else None)
        elif needs_state:
            initial.zero_() if grad_state is None else initial.copy_(grad_state)
        return *results, initial

    return launch
