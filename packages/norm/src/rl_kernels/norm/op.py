"""The registration of rms_norm with the registry and torch: schemas, fake kernels, backends, their promises.

layer_norm is the same operator with ``centered``. In the raw ops x and residual are ``[N, D]``. ``stats[2, N]`` is FP32
(FP64 for FP64) and holds for each row the factor that multiplies it, and the mean that is subtracted first: 0 unless
``centered``. ``backward`` takes the gradient of the norm. With a residual it also takes the gradient of the sum, and x
is the sum. The gradients of weight and bias have the dtype of ``stats``, and are empty if they are not needed;
``backward_into`` adds the gradient of the weight to ``main_grad``. The ops with a ``gate[N, D]`` take it first, or
after x, and return its gradient after dx.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.torchlib.ops import define
from rl_kernels.core.triton_lib.launch import triton_backend
from rl_kernels.norm.results import result_dtype

WIDEST = 16384
"""Largest number of columns that one program of the Triton kernels holds in its registers."""
_OPTIONS = "Tensor? weight, Tensor? bias, float eps, bool centered, float offset, bool cast_first, str backend"
_GRADIENTS = "Tensor grad, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor stats, bool centered, float offset"
SCHEMAS = {
    "forward": f"(Tensor x, {_OPTIONS}) -> (Tensor, Tensor)",
    "forward_sum": f"(Tensor x, Tensor residual, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    "forward_gated": f"(Tensor x, Tensor gate, {_OPTIONS}) -> (Tensor, Tensor)",
    "backward": f"({_GRADIENTS}, bool needs_weight, bool needs_bias, str backend) -> (Tensor, Tensor, Tensor)",
    "backward_into": f"({_GRADIENTS}, Tensor(a!) main_grad, bool needs_bias, str backend) -> (Tensor, Tensor)",
    "backward_gated": (
        f"(Tensor gate, {_GRADIENTS}, bool needs_weight, bool needs_bias, str backend)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "backward_gated_into": (
        f"(Tensor gate, {_GRADIENTS}, Tensor(a!) main_grad, bool needs_bias, str backend) -> (Tensor, Tensor, Tensor)"
    ),
}


def _fake_forward(x: torch.Tensor, weight: torch.Tensor | None, *options: Any) -> tuple[torch.Tensor, ...]:
    cast_first = options[-1]
    stats = x.new_empty((2, x.shape[0]), dtype=compute_dtype(x.dtype))
    return x.new_empty(x.shape, dtype=result_dtype(x, weight, cast_first)), stats


def _fake_forward_sum(x: torch.Tensor, residual: torch.Tensor, *options: Any) -> tuple[torch.Tensor, ...]:
    output, stats = _fake_forward(x, *options)
    return output, x.new_empty(x.shape), stats


def _fake_forward_gated(x: torch.Tensor, gate: torch.Tensor, *options: Any) -> tuple[torch.Tensor, ...]:
    _, stats = _fake_forward(x, *options)
    return x.new_empty(x.shape), stats


def _fake_backward(grad: Any, grad_sum: Any, x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    *_, stats, _, _, needs_weight, needs_bias = arguments
    gradients = (stats.new_empty(x.shape[1] if needed else 0) for needed in (needs_weight, needs_bias))
    return x.new_empty(x.shape), *gradients


def _fake_backward_into(grad: Any, grad_sum: Any, x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    *_, stats, _, _, _, needs_bias = arguments
    return x.new_empty(x.shape), stats.new_empty(x.shape[1] if needs_bias else 0)


def _fake_backward_gated(gate: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    dx, *rest = _fake_backward(*arguments)
    return dx, gate.new_empty(gate.shape), *rest


def _fake_backward_gated_into(gate: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    dx, dbias = _fake_backward_into(*arguments)
    return dx, gate.new_empty(gate.shape), dbias


FAKES: dict[str, Callable[..., Any]] = {
    "forward": _fake_forward,
    "forward_sum": _fake_forward_sum,
    "forward_gated": _fake_forward_gated,
    "backward": _fake_backward,
    "backward_into": _fake_backward_into,
    "backward_gated": _fake_backward_gated,
    "backward_gated_into": _fake_backward_gated_into,
}


def describe(x: torch.Tensor, *_: object, **__: object) -> Call:
    """Describe a call of a public function to the dispatcher."""
    return Call.of(x, D=x.shape[-1])


def _limits(call: Call) -> str | None:
    size = call.traits.get("D", 0)
    return None if size <= WIDEST else f"takes rows of up to {WIDEST} columns, and D is {size}"


OPERATOR = Operator(
    name="rms_norm",
    package="rl_kernels.norm",
    summary="RMSNorm and LayerNorm whose rows do not depend on the batch, with the residual's sum and a gate",
    shape=("N", "D"),
    rows=frozenset({"N"}),
    schemas=SCHEMAS,
    fakes=FAKES,
    backends=(
        triton_backend("rl_kernels.norm.backends.triton.backend", _limits),
        Backend("native", "rl_kernels.norm.backends.native", {"cpu": INVARIANT, "cuda": INVARIANT}),
    ),
    describe=describe,
    functions=("layer_norm",),
    canary="rl_kernels.norm.canary",
)

ops = define(OPERATOR)
