"""The raw ops of ``route`` on a GPU: a product of core, and one launch in Triton for scores, choice and weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import readable
from rl_kernels.core.triton_lib.launch import Launch, next_power_of_2
from rl_kernels.moe.choice import SCORINGS
from rl_kernels.moe.op import route_gradients
from rl_kernels.moe.triton_lib import choice

WARPS = 1


def raw_ops(product: Any) -> tuple[prepared, ...]:
    """Return ``route_logits``, ``route_backward`` and ``route_backward_into``; ``product`` is a class of core."""
    makers = partial(_logits, product), partial(_backward, product, False), partial(_backward, product, True)
    return tuple(prepared(make) for make in makers)


def _logits(
    make: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> Launches:
    """Return ``hidden @ weight^T + bias`` ``[T, E]``."""
    shape = hidden.shape[0], weight.shape[0]
    product = make(hidden, weight.t(), hidden.new_empty(shape, dtype=out_dtype), bias)

    def launch(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
        out = hidden.new_empty(shape, dtype=out_dtype)
        product(hidden, weight.t(), out, bias)
        return out

    return launch


@prepared
def route_choose(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    top_k: int,
    groups: int,
    kept: int,
    scoring: str,
    normalize: bool,
    scale: float,
) -> Launches:
    """Return ids ``[T, k]``, int32, and FP32 weights ``[T, k]``."""
    tokens, count = logits.shape
    each = count // groups
    tile = (next_power_of_2(groups), next_power_of_2(each), top_k, next_power_of_2(top_k))
    numbers = (scale, count, SCORINGS.index(scoring), normalize, groups, kept, each, *tile)
    choose = Launch(choice.choose, (tokens,), numbers, num_warps=WARPS)

    def launch(
        logits: torch.Tensor, correction_bias: torch.Tensor | None, ids: torch.Tensor | None, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = logits.new_empty(tokens, top_k, dtype=torch.int32)
        weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
        if tokens:
            operands = [x if x is None else readable(x, x.is_contiguous()) for x in (logits, correction_bias, ids)]
            with device_of(logits):
                choose(*operands, out, weights)
        return out, weights

    return launch


def _backward(product: Any, has_buffer: bool, *arguments: Any) -> Launches:
    """Return the gradients of hidden, weight and bias; with a buffer, add that of the weight to it."""
    _, _, hidden, weight, logits, ids, scoring, normalize, scale, *buffer, needs = arguments
    (tokens, count), slots = logits.shape, ids.shape[1]
    dz = hidden.new_empty(logits.shape)
    dhidden, dweight, dbias = route_gradients(hidden, weight, needs)
    tile = (1, next_power_of_2(count), slots, next_power_of_2(slots))
    numbers = (scale, count, SCORINGS.index(scoring), normalize, 1, count, *tile)
    of_logits = Launch(choice.choose_backward, (tokens,), numbers, num_warps=WARPS)
    of_hidden = product(dz, weight, dhidden) if needs[0] else None
    (target,) = buffer or (dweight,)
    is_summed = needs[1] or has_buffer
    of_weight = product(dz, hidden, target, a_transposed=True, continues=has_buffer) if is_summed else None
    ones = hidden.new_ones((tokens, 1))
    of_bias = product(ones, dz, dbias[None], a_transposed=True) if needs[2] else None

    def launch(*arguments: Any) -> tuple[torch.Tensor, ...]:
        grad_weights, grad_logits, hidden, weight, logits, ids, *_, needs = arguments
        results = route_gradients(hidden, weight, needs)
        dz = hidden.new_empty(logits.shape)
        if tokens:
            operands = (grad_weights, grad_logits, logits, ids)
            with device_of(hidden):
                of_logits(*(x if x is None else readable(x, x.is_contiguous()) for x in operands), dz)
        if of_hidden is not None:
            of_hidden(dz, weight, results[0])
        if of_weight is not None:
            of_weight(dz, hidden, arguments[-2] if has_buffer else results[1])
        if of_bias is not None:
            of_bias(hidden.new_ones((tokens, 1)), dz, results[2][None])
        return tuple(results)

    return launch
