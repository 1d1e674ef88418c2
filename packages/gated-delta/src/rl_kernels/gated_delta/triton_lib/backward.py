"""The backward pass of all backends with kernels: a backend's passes over chunks, then all chunks at once in Triton.

The passes recompute the chunks: products and inverses, the states at their starts, and the residuals. They also take
the gradient of the state through the chunks, in descending order. Three launches are left: systems, queries and keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from rl_kernels.core.calls import Launches
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import ALIGNED, readable
from rl_kernels.core.operator import tiles_change_no_bit
from rl_kernels.core.triton_lib.launch import Launch
from rl_kernels.gated_delta.inputs import COUNT, Inputs
from rl_kernels.gated_delta.triton_lib.schedule import tile_of_differentiate


class Chunks(NamedTuple):
    """What passes over chunks leave.

    Attributes:
        unit_q: ``[slots, Hk, 64, Dk]``: queries, normalized; keys likewise.
        sums: ``[slots, Hv, 64]``, FP32: sums of g from the first row of a chunk.
        inverse: ``[slots, Hv, 64, 64]``, FP32: ``(1 + A)^-1``.
        states: ``[slots, Hv, Dk, Dv]``: the states at the start of chunks, rounded; dstates: gradients of those after.
        residuals: ``[slots, Hv, 64, Dv]``.
        kept: ``[slots, Hv, n]``, FP32: numbers whose sum is that of ``states`` times ``dstates``.
    """

    unit_q: torch.Tensor
    unit_k: torch.Tensor
    sums: torch.Tensor
    inverse: torch.Tensor
    states: torch.Tensor
    dstates: torch.Tensor
    residuals: torch.Tensor
    kept: torch.Tensor


class Passes(Protocol):
    """What a backend prepares for calls of one kind.

    Attributes:
        is_empty: whether there is no token; then there is nothing else.
        slots: places of chunks.
        places: tokens, chunks of a sequence of a batch, sequences, and the bits of their number.
        sizes: Hk, Hv, Dk and Dv.
        strides: of q and of k, as ``readable`` returns them, without the last.
        kept: n of ``Chunks.kept``.
    """

    is_empty: bool
    slots: int
    places: tuple[int, int, int, int]
    sizes: tuple[int, int, int, int]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    kept: int

    def readable(self, arguments: tuple[Any, ...]) -> Inputs:
        """Return the arguments of forward, with copies of what kernels cannot read."""

    def run(
        self,
        inputs: Inputs,
        grad: torch.Tensor,
        grad_state: torch.Tensor | None,
        dv: torch.Tensor,
        initial: torch.Tensor | None,
    ) -> Chunks:
        """Launch, and write the gradients of v, and of the initial state unless it is None."""


class Differentiate:
    """The launches for all chunks at once, of calls of one kind."""

    def __init__(self, passes: Passes, inputs: Inputs) -> None:
        # Imports Triton, which the passes may do without.
        from rl_kernels.gated_delta.triton_lib import differentiate

        key_heads, heads, size, value_size = sizes = passes.sizes
        fast = tiles_change_no_bit(inputs.q.device)
        width, warps, stages = tile_of_differentiate(inputs.q.dtype, size, value_size, fast)

        def of_chunks(kernel: Any, heads: int, *numbers: Any) -> Launch:
            numbers = (*passes.places, *numbers)
            return Launch(kernel, (passes.slots, heads), numbers, num_warps=warps, num_stages=stages)

        q_strides, k_strides = passes.strides
        normalize = inputs.normalize_qk
        self.systems = of_chunks(differentiate.systems, heads, *sizes, width)
        self.queries = of_chunks(differentiate.queries, key_heads, *q_strides, *sizes, width, normalize)
        self.keys = of_chunks(differentiate.keys, key_heads, *k_strides, *sizes, width, passes.kept, normalize)

    def run(self, inputs: Inputs, chunks: Chunks, grad: torch.Tensor, results: list[torch.Tensor]) -> None:
        """Launch, and write ``results``, the gradients of q, k, g and beta; that of v is there."""
        dq, dk, dv, dg, dbeta = results
        q, k, beta, scale = inputs.q, inputs.k, inputs.beta, inputs.scale
        places = inputs.cu_seqlens, inputs.start
        unit_q, unit_k, sums, inverse, states, dstates, residuals, kept = chunks
        dqk, dkk = (torch.empty_like(inverse, dtype=q.dtype) for _ in range(2))
        dfaded, moved = q.new_empty((*sums.shape, q.shape[3])), torch.empty_like(sums)
        products = dqk, dkk, dfaded
        self.systems(unit_q, unit_k, beta, sums, inverse, dstates, residuals, grad, *products, dbeta, *places, scale)
        self.queries(q, unit_q, unit_k, sums, states, grad, dqk, moved, dq, *places, scale)
        self.keys(k, unit_q, unit_k, sums, states, dv, *products, moved, kept, dk, dg, *places)


def launches_of(passes: Passes, inputs: Inputs, grad: torch.Tensor, needs_state: bool) -> Launches:
    """Return the launches of ``backward``: the gradients of q, k, v, g, beta, and of the initial state if needed."""
    shape = inputs.state_shape
    dense = torch.empty(grad.shape, device="meta").stride() == grad.stride() and not grad.data_ptr() % ALIGNED
    rest = None if passes.is_empty else Differentiate(passes, inputs)

    def launch(*args: Any) -> tuple[torch.Tensor, ...]:
        call, (grad, grad_state) = passes.readable(args[:COUNT]), args[COUNT : COUNT + 2]
        grad_state = None if grad_state is None else grad_state.contiguous()
        # Tokens of padding have no gradient.
        is_padded = rest is None or call.start is not None
        results = [x.new_zeros(x.shape) if is_padded else x.new_empty(x.shape) for x in call[:5]]
        initial = call.v.new_empty(shape if needs_state else 0, dtype=torch.float32)
        if rest is not None:
            with device_of(call.q):
                grad = readable(grad, dense)
                chunks = passes.run(call, grad, grad_state, results[2], initial if needs_state else None)
                rest.run(call, chunks, grad, results)
        elif needs_state:
            initial.zero_() if grad_state is None else initial.copy_(grad_state)
        return *results, initial

    return launch
