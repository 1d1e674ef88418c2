"""causal_conv1d in PyTorch, for any device: element by element, so that a token's bits depend on its inputs alone.

Sums over the taps ascend from the oldest input, on top of the bias. The gradients of weight and bias are sums over the
tokens: a tree within each 64 tokens of a sequence, then the sums of these in ascending order, over the sequences too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.rowwise.silu import silu, silu_and_slope
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.conv_inputs import COUNT, PAST, TAPS, ConvInputs


class _Tokens(NamedTuple):
    """Places of tokens, or of the inputs before a sequence, ``[N]`` each.

    Attributes:
        sequence: their sequences.
        position: their numbers in the sequence: negative for padding and for inputs before it.
        length: numbers of tokens in their sequences.
        at: their numbers in the flattened batch.
    """

    sequence: torch.Tensor
    position: torch.Tensor
    length: torch.Tensor
    at: torch.Tensor


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output ``[B, T, D]``, last inputs ``[sequences, 3, D]`` or empty)."""
    call, return_state = ConvInputs(*args[:COUNT]), args[COUNT]
    tokens, first = _tokens(call), _first(call)
    result = _weighted(call, _taps(call, tokens))
    result = silu(result) if call.silu else result
    out = torch.where(tokens.position[:, None] >= 0, result, 0).to(call.x.dtype).view(call.x.shape)
    if not return_state:
        return out, out.new_empty(0)
    last = torch.arange(-PAST, 0, device=out.device)
    ends = (value[:, None].expand(-1, PAST).flatten() for value in first)
    sequence, _, length, at = ends
    position = length + last.repeat(call.sequences)
    state = _inputs(call, _Tokens(sequence, position, length, at + position), 0)
    return out, state.view(call.state_shape).clone()


def backward(*args: Any) -> tuple[torch.Tensor, ...]:
    """Return (dx ``[B, T, D]``, dweight ``[D, 4]`` and dbias ``[D]`` or empty, dstate ``[sequences, 3, D]``)."""
    call, (grad, grad_state, needs_weight, needs_bias) = ConvInputs(*args[:COUNT]), args[COUNT:]
    dtype = compute_dtype(call.x.dtype)
    tokens, first = _tokens(call), _first(call)
    taps = _taps(call, tokens)
    upstream = grad.reshape(-1, grad.shape[2]).to(dtype)
    if call.silu:
        upstream = upstream * silu_and_slope(_weighted(call, taps))[1]
    upstream = torch.where(tokens.position[:, None] >= 0, upstream, 0)
    dx = torch.where(tokens.position[:, None] >= 0, _pulled(call, tokens, upstream, grad_state), 0)
    dweight = upstream.new_empty(0)
    if needs_weight:
        dweight = torch.stack([_sum(call, tokens, upstream * tap) for tap in taps], 1)
    dbias = _sum(call, tokens, upstream) if needs_bias else upstream.new_empty(0)
    dstate = call.x.new_empty(0)
    if call.state is not None:
        sequence, _, length, at = (value[:, None].expand(-1, PAST).flatten() for value in first)
        position = torch.arange(-PAST, 0, device=at.device).repeat(call.sequences)
        before = _Tokens(sequence, position, length, at + position)
        dstate = _pulled(call, before, upstream, grad_state).to(call.x.dtype).view(call.state_shape)
    return dx.to(call.x.dtype).view(call.x.shape), dweight, dbias, dstate


def _first(call: ConvInputs) -> _Tokens:
    """Return the first token of each sequence."""
    count, device = call.x.shape[1], call.x.device
    sequence = torch.arange(call.sequences, device=device)
    if call.cu_seqlens is not None:
        bounds = call.cu_seqlens.long().clamp(0, count)
        return _Tokens(sequence, torch.zeros_like(sequence), bounds.diff().clamp(min=0), bounds[:-1])
    begin = torch.zeros_like(sequence) if call.start is None else call.start.long().clamp(0, count)
    return _Tokens(sequence, torch.zeros_like(sequence), count - begin, sequence * count + begin)


def _tokens(call: ConvInputs) -> _Tokens:
    """Return the places of all tokens."""
    batch, count, _ = call.x.shape
    at = torch.arange(batch * count, device=call.x.device)
    first = _first(call)
    if call.cu_seqlens is None:
        sequence = at // max(count, 1)
    else:
        sequence = torch.searchsorted(first.at[1:].contiguous(), at, right=True)
    return _Tokens(sequence, at - first.at[sequence], first.length[sequence], at)


def _inputs(call: ConvInputs, tokens: _Tokens, back: int) -> torch.Tensor:
    """Return the inputs ``back`` before tokens ``[N, D]``: of the sequence, of its state, or zeros."""
    flat, position = call.x.reshape(-1, call.x.shape[2]), tokens.position - back
    values = flat.new_zeros(len(position), flat.shape[1])
    if len(flat):
        inside = flat[(tokens.at - back).clamp(0, len(flat) - 1)]
        values = torch.where(((position >= 0) & (position < tokens.length))[:, None], inside, values)
    if call.state is not None and len(position):
        before = call.state[tokens.sequence, (position + PAST).clamp(0, PAST - 1)]
        values = torch.where((position < 0)[:, None], before, values)
    return values


def _taps(call: ConvInputs, tokens: _Tokens) -> list[torch.Tensor]:
    """Return the inputs that tokens see, the oldest first, in the dtype of sums."""
    return [_inputs(call, tokens, back).to(compute_dtype(call.x.dtype)) for back in range(PAST, -1, -1)]


def _weighted(call: ConvInputs, taps: list[torch.Tensor]) -> torch.Tensor:
    weight = call.weight.to(taps[0].dtype)
    total = torch.zeros_like(taps[0]) if call.bias is None else call.bias.to(weight.dtype).expand_as(taps[0])
    for tap, factor in zip(taps, weight.unbind(1), strict=True):
        total = total + tap * factor
    return total


def _pulled(call: ConvInputs, tokens: _Tokens, upstream: torch.Tensor, grad_state: torch.Tensor | None) -> torch.Tensor:
    """Return the gradients of inputs ``[N, D]``: of the tokens that see them, the last first, and of the last state."""
    weight = call.weight.to(upstream.dtype)
    total = upstream.new_zeros(len(tokens.at), upstream.shape[1])
    for tap in range(TAPS):
        ahead = PAST - tap
        position = tokens.position + ahead
        if len(upstream):
            value = upstream[(tokens.at + ahead).clamp(0, len(upstream) - 1)] * weight[:, tap]
            total = total + torch.where(((position >= 0) & (position < tokens.length))[:, None], value, 0)
    if grad_state is not None and len(tokens.at):
        row = tokens.position - tokens.length + PAST
        value = grad_state.to(total.dtype)[tokens.sequence, row.clamp(0, PAST - 1)]
        total = total + torch.where(((row >= 0) & (row < PAST))[:, None], value, 0)
    return total


def _sum(call: ConvInputs, tokens: _Tokens, terms: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``terms[N, D]`` over the tokens: trees over 64 tokens of a sequence, in ascending order."""
    count, width = terms.shape
    # Sequence s has slots from (number of its first token) // 64 + s: enough for its chunks, whatever their lengths.
    first = _first(call)
    slot = (first.at // CHUNK + first.sequence)[tokens.sequence] + tokens.position // CHUNK
    slots = count // CHUNK + call.sequences
    rows = torch.where(tokens.position >= 0, slot * CHUNK + tokens.position % CHUNK, slots * CHUNK)
    parts = terms.new_zeros(slots * CHUNK + 1, width).index_put_((rows,), terms)[:-1].view(slots, CHUNK, width)
    while parts.shape[1] > 1:
        parts = parts[:, 0::2] + parts[:, 1::2]
    total = terms.new_zeros(width)
    for part in parts[:, 0].unbind():
        total = total + part
    return total
