"""The registration of experts with the registry and torch: schemas, fake kernels, backends, their promises.

In the raw ops ``gate_up[E, 2F, D]`` and ``down[E, D, F]`` may have any strides; the two rows of ``gate_up`` for one
column of the activation are F apart, or neighbors if ``interleaved``. A route is a token's slot, ``ids[T, k]``; an id
outside ``[0, E)`` has no expert. ``order[T k + E + 1]`` is int32: the routes ``t k + s`` sorted by (expert, token,
slot), then for each expert the position of its first route, and the end of the last one's. ``z[T k, 2F]`` are the
outputs of the first product in that order. ``forward`` returns the output alone, ``forward_kept`` also z and the order.

Without ``weights``, which k = 1 alone may be, ``forward`` returns the routes' own outputs ``[T, D]``; those of routes
without an expert are undefined. ``combine`` adds such rows of ``y[R, D]``: the one at ``places[t, s]`` belongs to that
route of a token; ``ids`` and ``experts`` say which routes count.

``backward`` returns the gradients of hidden, weights, gate_up, down, gate_up_bias and down_bias; those that ``needs``
leaves out are empty. ``backward_into`` adds those of gate_up and down to FP32 buffers, where one is given.

``route`` has ops of its own: ``route_logits`` is ``hidden[T, D] @ weight[E, D]^T + bias[E]``, ``route_choose`` returns
ids and weights ``[T, k]`` of ``logits[T, E]``, and takes the ids where they are given. ``route_backward`` returns the
gradients of hidden, weight and bias, ``route_backward_into`` adds that of weight to an FP32 buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_kernels.core.cuda.where import cuda_backend
from rl_kernels.core.operator import INVARIANT, REPEATABLE, Backend, Call, Operator
from rl_kernels.core.torchlib.ops import define
from rl_kernels.core.triton_lib.launch import triton_backend
from rl_kernels.core.triton_lib.launch import why_not as triton_why_not
from rl_kernels.moe.inputs import COUNT, Inputs

PER_CHUNK = 8
"""Numbers of 16 bits in 16 bytes, of which TMA's rows are multiples."""
_INPUTS = (
    "Tensor hidden, Tensor gate_up, Tensor down, Tensor ids, Tensor? weights, Tensor? gate_up_bias, Tensor? down_bias, "
    "Tensor? shared, str activation, bool interleaved"
)
_BACKWARD = f"{_INPUTS}, Tensor grad, Tensor? z, Tensor? order"
_SCORING = "str scoring, bool normalize, float scale"
_ROUTE_BACKWARD = (
    f"Tensor grad_weights, Tensor? grad_logits, Tensor hidden, Tensor weight, Tensor logits, Tensor ids, {_SCORING}"
)
SCHEMAS = {
    "forward": f"({_INPUTS}, str backend) -> Tensor",
    "forward_kept": f"({_INPUTS}, str backend) -> (Tensor, Tensor, Tensor)",
    "combine": (
        "(Tensor y, Tensor ids, Tensor places, Tensor? weights, Tensor? shared, int experts, str backend) -> Tensor"
    ),
    "backward": f"({_BACKWARD}, bool[] needs, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "backward_into": (
        f"({_BACKWARD}, Tensor(a!)? gate_up_grad, Tensor(b!)? down_grad, bool[] needs, str backend)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "route_logits": "(Tensor hidden, Tensor weight, Tensor? bias, ScalarType out_dtype, str backend) -> Tensor",
    "route_choose": (
        "(Tensor logits, Tensor? correction_bias, Tensor? ids, int top_k, int groups, int kept, "
        f"{_SCORING}, str backend) -> (Tensor, Tensor)"
    ),
    "route_backward": f"({_ROUTE_BACKWARD}, bool[] needs, str backend) -> (Tensor, Tensor, Tensor)",
    "route_backward_into": (
        f"({_ROUTE_BACKWARD}, Tensor(a!) weight_grad, bool[] needs, str backend) -> (Tensor, Tensor, Tensor)"
    ),
}


def order_size(ids: torch.Tensor, experts: int) -> int:
    """Return the number of elements of ``order``."""
    return ids.numel() + experts + 1


def _fake_forward(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


def _fake_forward_kept(*args: Any) -> tuple[torch.Tensor, ...]:
    hidden, gate_up, _, ids, *_ = args
    order = ids.new_empty(order_size(ids, gate_up.shape[0]), dtype=torch.int32)
    return hidden.new_empty(hidden.shape), hidden.new_empty((ids.numel(), gate_up.shape[1])), order


def gradients(needs: list[bool], inputs: Inputs) -> list[torch.Tensor]:
    """Return an empty tensor for each gradient of ``backward``: with the argument's shape if it is needed."""
    return [
        x.new_empty(x.shape) if x is not None and is_needed else inputs.hidden.new_empty(0)
        for x, is_needed in zip(inputs.differentiable, needs, strict=True)
    ]


def _fake_backward(*args: Any) -> tuple[Any, ...]:
    return tuple(gradients(args[-1], Inputs(*args[:COUNT])))


def _fake_choose(
    logits: torch.Tensor, correction_bias: object, ids: object, top_k: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def route_gradients(hidden: torch.Tensor, weight: torch.Tensor, needs: list[bool]) -> list[torch.Tensor]:
    """Return an empty tensor for each gradient of ``route_backward``: with the argument's shape if it is needed."""
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return [hidden.new_empty(shape if is_needed else 0) for shape, is_needed in zip(shapes, needs, strict=True)]


def _fake_route_backward(
    grad_weights: object, grad_logits: object, hidden: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(route_gradients(hidden, weight, rest[-1]))


FAKES: dict[str, Callable[..., Any]] = {
    "forward": _fake_forward,
    "forward_kept": _fake_forward_kept,
    "combine": lambda y, ids, *_: y.new_empty((ids.shape[0], y.shape[1])),
    "backward": _fake_backward,
    "backward_into": _fake_backward,
    "route_logits": lambda hidden, weight, bias, out_dtype: hidden.new_empty(
        (hidden.shape[0], weight.shape[0]), dtype=out_dtype
    ),
    "route_choose": _fake_choose,
    "route_backward": _fake_route_backward,
    "route_backward_into": _fake_route_backward,
}


def describe_route(hidden: torch.Tensor, weight: torch.Tensor) -> Call:
    """Describe a call of ``route`` to the dispatcher."""
    return Call.of(hidden, D=hidden.shape[1], E=weight.shape[0])


def describe(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, *_: object, **__: object
) -> Call:
    """Describe a call to the dispatcher, with weights as the raw ops take them."""
    return Call.of(hidden, D=hidden.shape[1], F=down.shape[2], E=gate_up.shape[0], K=ids.shape[1])


def _cuda_limits(call: Call) -> str | None:
    if call.dtype == torch.float32:
        return "takes BF16 and FP16; IEEE products of FP32 run on triton"
    unaligned = [f"{name} = {call.traits[name]}" for name in ("D", "F") if call.traits.get(name, 0) % PER_CHUNK]
    if unaligned:
        return f"TMA needs rows that are multiples of 16 bytes, and {unaligned[0]}"
    return triton_why_not(call)


OPERATOR = Operator(
    name="experts",
    package="rl_kernels.moe",
    summary="the experts of a mixture and their weighted sum; a token depends on itself and its experts alone",
    shape=("T", "D", "F", "E", "K"),
    rows=frozenset({"T"}),
    schemas=SCHEMAS,
    fakes=FAKES,
    backends=(
        cuda_backend(
            "cuda-sm90",
            "rl_kernels.moe.backends.cuda_sm90.backend",
            archs="sm_90",
            limits=_cuda_limits,
            sources=["rl_kernels.moe.backends.cuda_sm90", "rl_kernels.core.cuda.gemm"],
        ),
        triton_backend("rl_kernels.moe.backends.triton.backend"),
        Backend("native", "rl_kernels.moe.backends.native", {"cpu": INVARIANT, "cuda": REPEATABLE}),
    ),
    describe=describe,
    functions=("route",),
    canary="rl_kernels.moe.canary",
)

ops = define(OPERATOR)
