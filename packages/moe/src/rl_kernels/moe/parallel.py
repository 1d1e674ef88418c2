"""``experts`` over ranks: each has some of the experts and its own tokens; their agreement, and the gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.distributed import Validate, agree_on_kind, group_of, group_size
from rl_kernels.core.main_grad import fold_grad_into_main_grad
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import first_order, is_asked_for, no_lost_derivatives
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.moe.arguments import Weights, cast, check_bounds, check_ids, choose_experts, main_grad_of
from rl_kernels.moe.autograd import SHARED, Settings
from rl_kernels.moe.exchange import Plan, plan_of
from rl_kernels.moe.inputs import Inputs
from rl_kernels.moe.op import ops


class Options(NamedTuple):
    """The arguments of ``experts`` besides its tensors and its group, in its order."""

    activation: str
    interleaved: bool
    transposed: bool
    recompute: bool
    num_experts: int | None
    max_tokens: int | None
    validate: Validate | None
    backend: str | None


class Call(NamedTuple):
    """A call that was checked: its tensors as the raw ops take them, and what they are computed with."""

    tensors: tuple[Any, ...]
    settings: Settings
    needs_gradient: bool


def several(process_group: object) -> ProcessGroup | None:
    """Return the group that an argument names, or None if it has one rank."""
    group = group_of(process_group, sizes=None)
    return group if group_size(group) > 1 else None


# Sizes from other ranks cannot be traced. torch.compiler.disable would do, but it imports the compiler at once.
@_disable_dynamo
def experts_over_ranks(tensors: tuple[Any, ...], group: ProcessGroup, options: Options) -> torch.Tensor:
    """Return the output of ``experts`` for this rank's tokens; the arguments are checked here."""
    call = _agreed(tensors, group, options)
    run = (call.tensors, call.settings, group, options.max_tokens)
    if not call.needs_gradient:
        return forward(*run)[0]
    out: torch.Tensor = ParallelExperts.apply(*call.tensors, *run[1:])
    for name, value, buffer in zip(("gate_up", "down"), tensors[1:3], call.settings.main_grads, strict=True):
        if buffer is not None and value.requires_grad:
            fold_grad_into_main_grad(name, value, out)
    return out


def _agreed(tensors: tuple[Any, ...], group: ProcessGroup, options: Options) -> Call:
    """Check the arguments and, in the first call of a kind, that all ranks give ones that fit.

    Raises:
        TypeError, ValueError: an argument is wrong on this rank or, if ranks are compared, on any.
    """
    call, error = None, None
    try:
        call = _checked(tensors, group, options)
    except Exception as caught:
        # Whatever it is, the other ranks would wait for this one.
        error = caught
    same = _compared(tensors, options)
    is_hidden = isinstance(tensors[0], torch.Tensor) and values_hidden(tensors[0])
    compares = False if is_hidden else True if options.validate is None else options.validate
    kind = "experts", *map(str, same.values())

    def every() -> dict[str, object]:
        return {**same, "backend": None if call is None else call.settings.ready.backend}

    agree_on_kind("experts", group, compares, kind, error, every)
    assert call is not None
    return call


def _compared(tensors: tuple[Any, ...], options: Options) -> dict[str, object]:
    """Return what must be equal on all ranks: no number of tokens."""
    hidden, gate_up, down, ids, _, *biases, _ = tensors
    dtypes = [str(getattr(x, "dtype", None)).removeprefix("torch.") for x in (hidden, gate_up)]
    same: dict[str, object] = {
        "hidden": f"D = {_size(hidden, 1)}, {dtypes[0]}",
        "gate_up": f"{_size(gate_up, 0)} experts, {dtypes[1]}",
        "down": f"F = {_size(down, 1 if options.transposed is True else 2)}",
        "ids": f"k = {_size(ids, 1)}",
    }
    for name in ("activation", "interleaved", "num_experts", "max_tokens"):
        same[name] = getattr(options, name)
    for name, bias in zip(("gate_up_bias", "down_bias"), biases, strict=True):
        same[name] = "none" if bias is None else "given"
    needed = [torch.is_grad_enabled() and getattr(x, "requires_grad", False) for x in tensors]
    same["gradient of hidden"], same["gradient of weights"], same["gradients"] = (
        "needed" if is_needed else "not needed" for is_needed in (needed[0], needed[4], any(needed))
    )
    return same


def _size(x: object, dim: int) -> int | None:
    return x.shape[dim] if isinstance(x, torch.Tensor) and x.ndim > dim else None


def _checked(tensors: tuple[Any, ...], group: ProcessGroup, options: Options) -> Call:
    ranks, (_, gate_up, down, *_) = group_size(group), tensors
    activation, interleaved, transposed, recompute, num_experts, max_tokens, validate, backend = options
    check.flag("recompute", recompute)
    buffers = [main_grad_of(name, value, transposed) for name, value in (("gate_up", gate_up), ("down", down))]
    tensors = cast(*tensors)
    name = choose_experts(*tensors, activation, interleaved, transposed, backend)
    hidden, gate_up, down, ids, *_ = tensors
    if num_experts is None:
        raise ValueError("num_experts: expected the number of experts of all ranks with process_group")
    check_bounds(num_experts, len(gate_up), max_tokens, len(hidden), ranks)
    if max_tokens is None and values_hidden(hidden):
        raise ValueError("max_tokens: expected a number of tokens while a CUDA graph is captured: sizes need a sync")
    check_ids(ids, num_experts + 1, validate)
    no_lost_derivatives("experts", *tensors)
    if transposed:
        tensors = (hidden, gate_up.mT, down.mT, *tensors[3:])
    needs = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    settings = Settings(Ready(name), activation, interleaved, recompute, (buffers[0], buffers[1]))
    return Call(tensors, settings, needs)


class Saved(NamedTuple):
    """What backward needs besides the weights.

    Attributes:
        plan: the exchange.
        ids: those of this rank's tokens.
        rows: the received rows of hidden.
        z: the outputs of the first product for received routes, or None.
        order: their order, or None.
    """

    plan: Plan
    ids: torch.Tensor
    rows: torch.Tensor
    z: torch.Tensor | None
    order: torch.Tensor | None


def forward(
    tensors: tuple[Any, ...], settings: Settings, group: ProcessGroup, max_tokens: int | None, keeps: bool = False
) -> tuple[torch.Tensor, Saved]:
    """Return the output ``[T, D]``, and what backward needs."""
    hidden, gate_up, down, ids, weights, gate_up_bias, down_bias, shared = tensors
    backend = settings.ready.backend
    plan = plan_of(ids, weights, len(gate_up), group, max_tokens)
    rows = plan.send_tokens(hidden)
    inputs = Inputs(
        *(rows[plan.row_of_route], gate_up, down, plan.ids, None, gate_up_bias, down_bias, None),
        settings.activation,
        settings.interleaved,
    )
    results = ops["forward_kept" if keeps else "forward"](*inputs, backend)
    y, z, order = results if keeps else (results, None, None)
    total = len(gate_up) * group_size(group)
    out: torch.Tensor = ops["combine"](plan.send_back(y), ids, plan.places, weights, shared, total, backend)
    return out, Saved(plan, ids, rows, z, order)


def backward_over_ranks(
    weights: Weights, saved: Saved, settings: Settings, needs: list[bool], buffers: list[Any], grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of hidden, weights, gate_up, down and the biases, in the order of the raw ops."""
    plan, ids, backend = saved.plan, saved.ids, settings.ready.backend
    gate_up, down, gate_up_bias, down_bias = weights
    inputs = Inputs(
        *(saved.rows[plan.row_of_route], gate_up, down, plan.ids, plan.weights, gate_up_bias, down_bias, None),
        settings.activation,
        settings.interleaved,
    )
    upstream = plan.send_tokens(grad)[plan.row_of_route]
    into = any(buffer is not None for buffer in buffers)
    op, more = (ops["backward_into"], buffers) if into else (ops["backward"], [])
    dx, dots, *rest = op(*inputs, upstream, saved.z, saved.order, *more, needs, backend)
    total = len(gate_up) * group_size(plan.group)
    if needs[0]:
        dx = ops["combine"](plan.send_back(dx), ids, plan.places, None, None, total, backend)
    if needs[1]:
        returned = torch.cat((plan.send_back(dots)[:, 0], dots.new_zeros(1)))
        is_here = (ids >= 0) & (ids < total)
        dots = returned[torch.where(is_here, plan.places, len(returned) - 1)]
    return dx, dots, *rest


class ParallelExperts(torch.autograd.Function):
    """Experts over ranks; saves received rows, and unless ``recompute`` the outputs of the first product.

    Backward sends upstream rows to the experts, and the gradients of rows and weights back. All ranks must run it, and
    ask for the same gradients of hidden and of the routes' weights.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        """Return the output ``[T, D]``; the arguments are the tensors of ``Inputs``, then those of ``forward``."""
        *tensors, settings, group, max_tokens = arguments
        out, saved = forward(tuple(tensors), settings, group, max_tokens, keeps=not settings.recompute)
        plan = saved.plan
        _, gate_up, down, _, weights, *biases, _ = tensors
        kept = *saved[1:], gate_up, down, *biases
        save(ctx, *kept, plan.tokens, plan.places, plan.row_of_route, plan.ids, plan.weights)
        ctx.sizes, ctx.settings, ctx.dtype = plan[:3], settings, weights.dtype
        # Autograd counts only the tensors.
        present = [x is not None for x in tensors]
        ctx.positions = [sum(present[:number]) for number in range(len(present))]
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients; those of weights that were added to ``main_grad`` are None."""
        ids, rows, z, order, gate_up, down, gate_up_bias, down_bias, *of_plan = ctx.saved_tensors
        settings, weights = ctx.settings, Weights(gate_up, down, gate_up_bias, down_bias)
        inputs = zip(ctx.needs_input_grad, ctx.positions, strict=False)
        asked = [is_needed and is_asked_for(ctx, place) for is_needed, place in inputs]
        needs = [asked[number] for number in (0, 4, 1, 2, 5, 6)]
        pairs = list(zip(settings.main_grads, needs[2:4], strict=True))
        buffers = [buffer if is_needed else None for buffer, is_needed in pairs]
        needs[2:4] = [is_needed and buffer is None for buffer, is_needed in pairs]
        saved = Saved(Plan(*ctx.sizes, *of_plan), ids, rows, z, order)
        results = first_order(backward_over_ranks, weights, saved, settings, needs, buffers, grad)
        dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = (
            result if is_needed else None for result, is_needed in zip(results, needs, strict=True)
        )
        dweights = None if dweights is None else dweights.to(ctx.dtype)
        # A copy, as in ``Experts``.
        dshared = grad.clone() if ctx.needs_input_grad[SHARED] else None
        return dhidden, dgate_up, ddown, None, dweights, dgate_up_bias, ddown_bias, dshared, None, None, None
