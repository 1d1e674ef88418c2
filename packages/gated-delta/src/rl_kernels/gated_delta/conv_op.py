"""The registration of causal_conv1d with the registry and torch: schemas, fake kernels, backends, their promises.

The arguments of the raw ops are those of ``conv_inputs.ConvInputs``. ``forward`` returns the output ``[B, T, D]`` and,
with ``return_state``, the last inputs ``[sequences, 3, D]``, else an empty tensor. ``backward`` takes the gradients of
both, and returns those of x, weight, bias and state. The gradients of weight and bias are in FP32 (FP64 for FP64), and
empty if they are not needed; the one of the state is empty if there is no state.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.torchlib.ops import define
from rl_kernels.core.triton_lib.launch import triton_backend
from rl_kernels.gated_delta.conv_inputs import COUNT, ConvInputs

_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor? cu_seqlens, Tensor? start, bool silu"
SCHEMAS = {
    "forward": f"({_INPUTS}, bool return_state, str backend) -> (Tensor, Tensor)",
    "backward": (
        f"({_INPUTS}, Tensor grad, Tensor? grad_state, bool needs_weight, bool needs_bias, str backend)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
}


def _fake_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call, return_state = ConvInputs(*args[:COUNT]), args[COUNT]
    return call.x.new_empty(call.x.shape), call.x.new_empty(call.state_shape if return_state else 0)


def _fake_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    call, (needs_weight, needs_bias) = ConvInputs(*args[:COUNT]), args[-2:]
    x, dtype = call.x, compute_dtype(call.x.dtype)
    return (
        x.new_empty(x.shape),
        x.new_empty(call.weight.shape if needs_weight else 0, dtype=dtype),
        x.new_empty(x.shape[2] if needs_bias else 0, dtype=dtype),
        x.new_empty(0 if call.state is None else call.state_shape),
    )


FAKES = {"forward": _fake_forward, "backward": _fake_backward}


def describe(x: torch.Tensor, *_: object, **__: object) -> Call:
    """Describe a call of the public function to the dispatcher."""
    return Call.of(x, D=x.shape[-1])


OPERATOR = Operator(
    name="causal_conv1d",
    package="rl_kernels.gated_delta",
    summary="the short causal convolution of hybrid models, whose bits are the same in prefill, chunks and decode",
    shape=("B", "T", "D"),
    rows=frozenset({"B", "T"}),
    schemas=SCHEMAS,
    fakes=FAKES,
    backends=(
        triton_backend("rl_kernels.gated_delta.backends.triton.conv.backend"),
        Backend("native", "rl_kernels.gated_delta.backends.conv_native", {"cpu": INVARIANT, "cuda": INVARIANT}),
    ),
    describe=describe,
    spec="rl_kernels.gated_delta.spec.conv_cases",
    bench="rl_kernels.gated_delta.spec.conv_bench",
    canary="rl_kernels.gated_delta.conv_canary",
)

ops = define(OPERATOR)
