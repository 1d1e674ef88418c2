"""gated_delta_rule in PyTorch, for any device.

The reduction order is the contract of this backend. Chunks of 64 tokens begin at multiples of 64 of their sequence.
Products over the head size, and sums over the rows of a chunk, are those of ``core.batched``: of one inner size each,
so that a number's bits depend on its row and column alone; rows that are not there yet are zeros. Decays are added row
by row; a number of the inverse subtracts its terms in ascending order, rounded one by one. Rounded to the dtype of q
are: normalized queries and keys; the state and the inverse, where they are factors of a product; decayed products of
queries with keys, and these times the inverse; the faded inverse, and its product with the keys; residuals; and the
output. Backward rounds none.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.gated_delta.cache import DeltaCache
from rl_kernels.gated_delta.chunks import Rows, chunks_of, next_state, output_of, rows_of
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.gradients import of_chunks, over_group, through_norm, through_states
from rl_kernels.gated_delta.inputs import COUNT, Inputs, state_dtype
from rl_kernels.gated_delta.places import places_of


def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output ``[B, T, Hv, Dv]``, and the states after the last tokens, empty unless they are asked for."""
    *fields, with_state = arguments
    inputs = Inputs(*fields)
    out = inputs.v.new_zeros(inputs.v.shape)
    places = places_of(inputs)
    state = initial_state(inputs)
    if places.parts:
        chunks = chunks_of(inputs, places)
        for part in places.parts:
            sequences = places.sequences[part]
            rows = rows_of(chunks, part, state[sequences])
            places.put(out, output_of(chunks, part, rows, inputs.scale), part)
            if with_state or part.stop < len(places.sequences):
                state[sequences] = next_state(chunks, part, rows, state[sequences])
    return out, state if with_state else state.new_empty(0)


def initial_state(inputs: Inputs) -> torch.Tensor:
    """Return a copy of the states at the first tokens, zeros by default."""
    if inputs.initial_state is not None:
        return inputs.initial_state.clone(memory_format=torch.contiguous_format)
    return inputs.q.new_zeros(inputs.state_shape, dtype=state_dtype(inputs.q.dtype))


def continued(*arguments: Any) -> torch.Tensor:
    """Return the output ``[B, T, Hv, Dv]`` of sequences that go on from a cache, and write to the cache."""
    inputs, cache = Inputs(*arguments[:COUNT]), DeltaCache(*arguments[COUNT:])
    out = inputs.v.new_zeros(inputs.v.shape)
    places = places_of(inputs, cache.lengths)
    if not places.parts:
        return out
    chunks = chunks_of(inputs, places, cache)
    for part in places.parts:
        sequences = places.sequences[part]
        state = cache.state[sequences]
        rows = rows_of(chunks, part, state, cache)
        places.put(out, output_of(chunks, part, rows, inputs.scale), part)
        held = chunks.k[part, :: inputs.group], rows.residuals, chunks.decays[part], chunks.inverse[part]
        for target, value in zip(cache[1:5], held, strict=True):
            target[sequences] = value.to(target.dtype)
        is_whole = places.used[part] == CHUNK
        if is_whole.any():
            cache.state[sequences[is_whole]] = next_state(chunks, part, rows, state)[is_whole]
    counts = torch.zeros_like(cache.lengths)
    is_token = places.tokens < inputs.q.shape[0] * inputs.q.shape[1]
    cache.lengths.add_(counts.index_add_(0, places.sequences, is_token.sum(1).to(counts.dtype)))
    return out


def backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v, g, beta and the initial state, the last one empty unless it is asked for."""
    inputs, (grad, grad_state, needs_state) = Inputs(*arguments[:COUNT]), arguments[COUNT:]
    state = initial_state(inputs)
    dstate = torch.zeros_like(state) if grad_state is None else grad_state.clone(memory_format=torch.contiguous_format)
    places = places_of(inputs)
    results = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs[:5]]
    if places.parts:
        chunks = chunks_of(inputs, places)
        upstream = places.rows_of(grad, state.dtype).mul_(inputs.scale)
        kept = []
        for part in places.parts:
            sequences = places.sequences[part]
            kept.append(rows_of(chunks, part, state[sequences]))
            state[sequences] = next_state(chunks, part, kept[-1], state[sequences])
        through = through_states(chunks, upstream, dstate)
        dq, dk, *others = of_chunks(chunks, Rows(*map(torch.cat, zip(*kept, strict=True))), upstream, *through)
        for number, (x, rows) in enumerate(((inputs.q, dq), (inputs.k, dk))):
            dense = torch.zeros_like(x, dtype=state.dtype, memory_format=torch.contiguous_format)
            places.put(dense, over_group(rows, inputs.group))
            results[number] = (through_norm(dense, x) if inputs.normalize_qk else dense).to(x.dtype)
        for target, rows in zip(results[2:], others, strict=True):
            places.put(target, rows)
    return *results, dstate if needs_state else dstate.new_empty(0)
