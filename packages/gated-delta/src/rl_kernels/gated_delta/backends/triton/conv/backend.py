"""causal_conv1d in Triton: inputs and gradients are read once and written once.

How tokens and channels are dealt to programs changes no bit of outputs, dx and dstate. CHUNK fixes the order of the
sums of dweight and dbias.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import readable
from rl_kernels.core.triton_lib.launch import Launch, ceil_div, next_power_of_2
from rl_kernels.gated_delta.backends.triton.conv import kernels
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.conv_inputs import COUNT, TAPS, ConvInputs

MOST_ROWS = 4
"""Largest number of tokens of a step of forward."""
PROGRAM, PROGRAM_BACKWARD = 256, 128
"""Channels of a program, which is one warp; with the numbers beside them the fastest of a few on an H200."""
STAGES, STAGES_BACKWARD = 3, 2
"""Steps of forward and backward, of at most 4 tokens each, that are in flight at once."""
COLUMNS, AHEAD = 64, 16
"""Channels of a program that adds parts, and the parts that it loads at once."""


class _Slots(NamedTuple):
    """The slots of a call, as ``kernels`` describes them.

    Attributes:
        total: number of all slots.
        numbers: tokens of a row, slots of a row, sequences, and steps of the search for a slot's sequence.
    """

    total: int
    numbers: tuple[int, int, int, int]


def _slots(call: ConvInputs) -> _Slots:
    (batch, tokens, _), sequences = call.x.shape, call.sequences
    if call.cu_seqlens is not None:
        count = tokens // CHUNK + sequences if sequences else 0
        return _Slots(count, (tokens, 0, sequences, sequences.bit_length()))
    slots = max(ceil_div(tokens, CHUNK), 1) if call.start is None else tokens // CHUNK + 2
    return _Slots(batch * slots, (tokens, slots, sequences, 0))


@prepared
def forward(*args: Any) -> Launches:
    """Return (output ``[B, T, D]``, last inputs ``[sequences, 3, D]`` or empty)."""
    call, return_state = ConvInputs(*args[:COUNT]), args[COUNT]
    (batch, tokens, size), (count, numbers) = call.x.shape, _slots(call)
    columns = min(PROGRAM, max(next_power_of_2(size), 16))
    rows = min(MOST_ROWS, next_power_of_2(max(tokens, 1)))
    copied, state_shape = _copied(call), call.state_shape
    constants = (*_strides(call.x, 0 in copied), size, CHUNK, rows, columns, call.silu, STAGES)
    convolve = Launch(kernels.forward, (count, ceil_div(size, columns)), (*numbers, *constants), num_warps=1)

    def launch(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        operands = list(args[: COUNT - 1])
        for place in copied:
            operands[place] = readable(operands[place], False)
        x = operands[0]
        out, last = x.new_empty(batch, tokens, size), x.new_empty(state_shape if return_state else 0)
        if count:
            with device_of(x):
                convolve(*operands, out, last if return_state else None)
        return out, last

    return launch


@prepared
def backward(*args: Any) -> Launches:
    """Return (dx ``[B, T, D]``, dweight ``[D, 4]`` and dbias ``[D]`` or empty, dstate ``[sequences, 3, D]``)."""
    call, (grad, grad_state, needs_weight, needs_bias) = ConvInputs(*args[:COUNT]), args[COUNT:]
    (batch, tokens, size), (count, numbers) = call.x.shape, _slots(call)
    columns = min(PROGRAM_BACKWARD, max(next_power_of_2(size), 16))
    copied, state_shape = _copied(call, grad, grad_state), call.state_shape
    strides = (*_strides(call.x, 0 in copied), *_strides(grad, COUNT - 1 in copied))
    constants = (*strides, size, CHUNK, columns, call.silu, STAGES_BACKWARD)
    gradients = Launch(kernels.backward, (count, ceil_div(size, columns)), (*numbers, *constants), num_warps=1)
    add = Launch(kernels.chain, (ceil_div(size, COLUMNS), TAPS + 1), (count, size, COLUMNS, AHEAD), num_warps=2)

    def launch(*args: Any) -> tuple[torch.Tensor, ...]:
        operands = [*args[: COUNT - 1], *args[COUNT : COUNT + 2]]
        for place in copied:
            operands[place] = readable(operands[place], False)
        x, has_state = operands[0], operands[3] is not None
        dx, dstate = x.new_empty(batch, tokens, size), x.new_empty(state_shape if has_state else 0)
        dweight = x.new_empty((size, TAPS) if needs_weight else 0, dtype=torch.float32)
        dbias = x.new_empty(size if needs_bias else 0, dtype=torch.float32)
        is_summed = needs_weight or needs_bias
        parts = x.new_empty(count, TAPS + 1, size, dtype=torch.float32) if is_summed else None
        with device_of(x):
            if count:
                gradients(*operands, dx, dstate if has_state else None, parts)
            if is_summed:
                add(parts, dweight if needs_weight else None, dbias if needs_bias else None)
        return dx, dweight, dbias, dstate

    return launch


def _copied(call: ConvInputs, grad: torch.Tensor | None = None, *others: torch.Tensor | None) -> list[int]:
    """Return the numbers of the operands that kernels cannot read as they are.

    x and the gradient of the output may have any strides but that of a channel, the others none.
    """
    loose, tensors = (0, COUNT - 1), (call.x, call.weight, call.bias, call.state, call.cu_seqlens, call.start)
    fits = [
        x is None or ((x.shape[2] == 1 or x.stride(2) == 1) if number in loose else x.is_contiguous())
        for number, x in enumerate((*tensors, grad, *others))
    ]
    return [number for number, is_read in enumerate(fits) if not is_read]


def _strides(x: torch.Tensor, is_copied: bool) -> tuple[int, int]:
    """Return the strides of rows and tokens, of a contiguous copy if it is copied."""
    return (x.shape[1] * x.shape[2], x.shape[2]) if is_copied else (x.stride(0), x.stride(1))
