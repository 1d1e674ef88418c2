"""Checks of arguments and the choice of a backend, remembered for calls of one kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.torchlib.autocast import autocast_linear
from rl_kernels.moe.activations import NAMES
from rl_kernels.moe.choice import SCORINGS
from rl_kernels.moe.inputs import COUNT, Inputs
from rl_kernels.moe.op import OPERATOR, describe, describe_route, ops

if TYPE_CHECKING:
    from rl_kernels.core.distributed import Validate


class Weights(NamedTuple):
    """The weights and biases of experts."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def cast(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    shared: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Return the tensors of ``experts``, in the order of ``Inputs``, cast as autocast casts operands."""
    hidden, gate_up, gate_up_bias = autocast_linear(hidden, gate_up, gate_up_bias)
    # hidden has the autocast dtype by now: it stands for a shared[T, D] that is not there.
    last, down, down_bias = autocast_linear(hidden if shared is None else shared, down, down_bias)
    return hidden, gate_up, down, ids, weights, gate_up_bias, down_bias, None if shared is None else last


def main_grad_of(name: str, weight: torch.Tensor, transposed: bool) -> torch.Tensor | None:
    """Return the ``main_grad`` of a weight in the layout of the raw ops, checked, or None."""
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return None
    check.main_grad(f"{name}.main_grad", buffer, weight)
    return buffer.mT if transposed else buffer


@remembered
def prepare_experts(*arguments: Any) -> Ready:
    """Check the arguments of ``experts``, choose a backend, and prepare the forward pass.

    Args:
        arguments: the fields of ``Inputs``, where weights may be transposed; then ``transposed``, whether the outputs
            of the first product are kept, and ``backend``.
    """
    *rest, keeps, backend = arguments
    inputs, name = _checked_experts(*rest, backend)
    return ops["forward_kept" if keeps else "forward"].ready(*inputs, name)


@remembered
def choose_experts(*arguments: Any) -> str:
    """Check the arguments as ``prepare_experts`` does, and return the name of a backend; without ``keeps``."""
    return _checked_experts(*arguments)[1]


def _checked_experts(*arguments: Any) -> tuple[Inputs, str]:
    """Return the arguments as the raw ops take them, and the backend."""
    inputs = Inputs(*arguments[:COUNT])
    transposed, backend = arguments[COUNT:]
    hidden, gate_up, down, ids, weights, gate_up_bias, down_bias, shared, activation, interleaved = inputs
    _check_operands(hidden, gate_up, down, transposed)
    check.tensor("ids", ids, check.INTEGERS, ndim=2)
    if not ids.shape[1]:
        raise ValueError(f"ids: expected at least one slot a token, got shape {tuple(ids.shape)}")
    check.shape("ids", ids, (hidden.shape[0], ids.shape[1]), "tokens of hidden by slots")
    check.tensor("weights", weights, check.HALF_AND_FLOAT, ndim=2)
    assert weights is not None
    check.shape("weights", weights, ids.shape, "that of ids")
    count, width, inner = gate_up.shape[0], hidden.shape[1], _inner(down, transposed)
    for name, bias, size in (("gate_up_bias", gate_up_bias, 2 * inner), ("down_bias", down_bias, width)):
        if bias is not None:
            check.tensor(name, bias, check.HALF_AND_FLOAT, ndim=2)
            check.shape(name, bias, (count, size), "experts by outputs of the product")
    if shared is not None:
        check.tensor("shared", shared, check.HALF_AND_FLOAT, ndim=2)
        check.shape("shared", shared, hidden.shape, "that of hidden")
    operands = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    check.same_dtype(hidden=hidden, **operands, shared=shared)
    check.same_device(hidden=hidden, ids=ids, weights=weights, **operands, shared=shared)
    check.choice("activation", activation, NAMES)
    check.flag("interleaved", interleaved)
    check.backend_name(backend)
    if transposed:
        inputs = inputs._replace(gate_up=gate_up.mT, down=down.mT)
    return inputs, choose(OPERATOR, describe(*inputs[:4]), backend).name


def _check_operands(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, transposed: bool) -> None:
    check.tensor("hidden", hidden, check.HALF_AND_FLOAT, ndim=2)
    check.tensor("gate_up", gate_up, check.HALF_AND_FLOAT, ndim=3)
    check.tensor("down", down, check.HALF_AND_FLOAT, ndim=3)
    check.flag("transposed", transposed)
    if 0 in (gate_up.shape[0], hidden.shape[1], _inner(down, transposed)):
        raise ValueError(
            f"down: expected at least one expert, D and F of at least 1, got shapes {tuple(gate_up.shape)} of gate_up "
            f"and {tuple(down.shape)}"
        )
    count, width, inner = gate_up.shape[0], hidden.shape[1], _inner(down, transposed)
    shapes = ((count, 2 * inner, width), (count, width, inner))
    if transposed:
        shapes = ((count, width, 2 * inner), (count, inner, width))
    check.shape("down", down, shapes[1], "experts of gate_up, D of hidden, F")
    check.shape("gate_up", gate_up, shapes[0], "experts, twice the F of down, D of hidden")


def _inner(down: torch.Tensor, transposed: bool) -> int:
    return down.shape[1 if transposed else 2]


def check_bounds(num_experts: int | None, count: int, max_tokens: int | None, tokens: int, ranks: int = 1) -> None:
    """Require a number of experts that ranks with ``count`` each have, and a bound of a rank's tokens, if given."""
    if num_experts is not None:
        check.integer("num_experts", num_experts, least=1)
        if num_experts % ranks:
            raise ValueError(
                f"num_experts: expected a multiple of the {ranks} ranks of process_group, got {num_experts}"
            )
        if count * ranks != num_experts:
            raise ValueError(
                f"gate_up: expected the weights of {num_experts // ranks} experts on each of the {ranks} ranks of "
                f"process_group (num_experts is {num_experts}), got {count}"
            )
    if max_tokens is not None:
        check.integer("max_tokens", max_tokens, least=max(1, tokens))


def check_ids(ids: torch.Tensor, size: int, validate: Validate | None) -> None:
    """Require ids in ``[0, size)`` if ``validate``; None: on a CPU, where the check waits for nothing."""
    if not (validate is None or validate == "ranks"):
        check.flag("validate", validate)
    if validate or (validate is None and ids.device.type == "cpu"):
        check.ids_in_range("ids", ids, size, ignorable=False)


class RouteReady(NamedTuple):
    """What ``route`` found out about calls of one kind: a product of FP32 or 16 bits, and the choice of its logits."""

    logits: Ready
    out_dtype: torch.dtype
    groups: int
    kept: int


@remembered
def prepare_route(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    scoring: str,
    bias: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    groups: tuple[int, int] | None,
    normalize: bool,
    scale: float,
    logits_dtype: torch.dtype | None,
    ids: torch.Tensor | None,
    backend: str | None,
) -> RouteReady:
    """Check the arguments of ``route``, choose a backend, and prepare the product."""
    check.tensor("hidden", hidden, check.HALF_AND_FLOAT, ndim=2)
    check.tensor("weight", weight, check.HALF_AND_FLOAT, ndim=2)
    check.shape("weight", weight, (weight.shape[0], hidden.shape[1]), "experts by D of hidden")
    if not weight.numel():
        raise ValueError(f"weight: expected at least one expert and D of at least 1, got shape {tuple(weight.shape)}")
    count = weight.shape[0]
    check.integer("top_k", top_k, least=1, most=count)
    check.choice("scoring", scoring, SCORINGS)
    for name, value in (("bias", bias), ("correction_bias", correction_bias)):
        if value is not None:
            check.tensor(name, value, check.HALF_AND_FLOAT, ndim=1)
            check.shape(name, value, (count,), "the experts of weight")
    check.same_dtype(hidden=hidden, weight=weight, bias=bias)
    check.flag("normalize", normalize)
    if scoring == "softmax_of_chosen" and not (normalize and groups is None and correction_bias is None):
        raise ValueError(
            "scoring: expected softmax or sigmoid with normalize=False, groups or correction_bias; softmax_of_chosen "
            "takes the largest logits, and its weights add up to 1"
        )
    check.number("scale", scale)
    if logits_dtype is not None:
        check.choice("logits_dtype", logits_dtype, check.HALF_AND_FLOAT)
    if ids is not None:
        check.tensor("ids", ids, check.INTEGERS, ndim=2)
        check.shape("ids", ids, (hidden.shape[0], top_k), "tokens of hidden by top_k")
    check.same_device(hidden=hidden, weight=weight, bias=bias, correction_bias=correction_bias, ids=ids)
    check.backend_name(backend)
    parts, kept = _groups(groups, count, top_k)
    out_dtype = logits_dtype or torch.float32
    name = choose(OPERATOR, describe_route(hidden, weight), backend).name
    return RouteReady(ops["route_logits"].ready(hidden, weight, bias, out_dtype, name), out_dtype, parts, kept)


def _groups(groups: object, count: int, top_k: int) -> tuple[int, int]:
    """Return the number of groups and how many are kept; (1, 1) without groups."""
    if groups is None:
        return 1, 1
    if not isinstance(groups, (tuple, list)) or len(groups) != 2:
        raise TypeError(f"groups: expected None or (number of groups, groups that are kept), got {groups!r}")
    number, kept = groups
    check.integer("groups", number, least=1, most=count)
    check.integer("groups", kept, least=1, most=number)
    if count % number or kept * (count // number) < top_k:
        raise ValueError(
            f"groups: expected a divisor of the {count} experts, and at least top_k = {top_k} experts in the groups "
            f"that are kept, got {groups!r}"
        )
    return number, kept
