"""First-order gradients of ops, and errors where an unsupported derivative would be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _functorch
from torch.autograd import forward_ad

from rl_kernels.core.calls import Ready
from rl_kernels.core.torchlib.observed import are_plain, is_traced


class _FirstOrder(torch.autograd.Function):
    """A backward op whose own backward raises: a second derivative must never be silently zero."""

    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], *args: Any) -> Any:
        ctx.name = op.__name__
        return op(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{ctx.name}: double backward is not supported")


def first_order(op: Callable[..., Any], *args: Any) -> Any:
    """Call a raw backward op so that differentiating its result raises ``RuntimeError``."""
    is_compiling = torch.compiler.is_compiling()
    # With gradients off, as in a backward pass without create_graph, nothing can differentiate the result backward.
    if not is_compiling and not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return op(*args)
    no_lost_derivatives(op.__name__, *args)
    if is_compiling or not torch.is_grad_enabled():
        return op(*args)
    return _FirstOrder.apply(op, *args)


def apply_of(function: Any, ready: Ready) -> Callable[..., Any]:
    """Return ``apply`` of an autograd Function for a call that ``no_lost_derivatives`` has passed.

    PyTorch's own looks for tensors that a transform wrapped, which prepared launches rule out: half of its host time.
    """
    return function.apply if ready.launches is None else super(torch.autograd.Function, function).apply


def is_asked_for(ctx: Any, number: int) -> bool:
    """Say whether the running backward pass needs the gradient of an argument of an autograd Function.

    ``ctx.needs_input_grad`` only says whether a pass may need it: ``torch.autograd.grad(loss, hidden)`` needs the
    gradient of hidden alone.

    Args:
        ctx: the Function's context, in its ``backward``.
        number: index of the argument among the tensor arguments.
    """
    if torch.compiler.is_compiling():
        return True
    try:
        is_needed: bool = torch._C._will_engine_execute_node(ctx.next_functions[number][0])
    except RuntimeError:
        # PyTorch raises for a leaf whose gradient ``torch.autograd.grad`` returns.
        return True
    return is_needed


def may_overwrite(saved: torch.Tensor) -> bool:
    """Say whether the running backward pass may write to a tensor that its Function saved: nobody reads it again.

    A pass with ``retain_graph`` or ``create_graph`` keeps the graph for another one, and under ``is_grads_batched``
    (vmap) one tensor serves many gradients. Memory of inference mode, from a hook for saved tensors, is not ours.
    """
    if torch.compiler.is_compiling() or is_traced() or not are_plain(saved) or saved.is_inference():
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def no_lost_derivatives(name: str, *values: Any) -> None:
    """Raise where an unsupported derivative would be lost silently.

    Unsupported are forward-mode AD, the gradient transforms of ``torch.func``, and gradients through
    ``torch.func.vmap``: inside them a tensor does not show that it requires grad.

    Args:
        name: name of the operator, for the message.
        values: its arguments; only tensors are looked at.

    Raises:
        RuntimeError: an argument carries a tangent of ``torch.func.jvp`` or ``torch.autograd.forward_ad``; or gradients
            are on inside ``torch.func.grad`` or a vmap, and an argument requires grad. Under torch.compile any call
            inside them raises.
    """
    # Check the level first: every call comes here, and few are inside forward-mode AD.
    if forward_ad._current_level >= 0 and (torch.compiler.is_compiling() or any(map(_has_tangent, values))):
        raise RuntimeError(f"{name}: forward-mode AD is not supported")
    transform = _transform()
    # Under torch.compile we cannot see what a tensor wraps.
    if transform and torch.is_grad_enabled() and (torch.compiler.is_compiling() or any(map(_requires_grad, values))):
        hint = "" if transform == "vmap" else "; torch.autograd.grad and .backward() are"
        raise RuntimeError(f"{name}: gradients through {transform} are not supported{hint}")


def _has_tangent(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    # We cannot tell which transform wrapped it; a tensor that no transform depends on is not wrapped.
    wrapped = _functorch.is_functorch_wrapped_tensor(value)
    return wrapped or forward_ad.unpack_dual(value).tangent is not None


def _transform() -> str:
    """Name the active transform of ``torch.func`` that gradients cannot pass through, or return ""."""
    if _functorch.maybe_current_level() is None:
        return ""
    kinds = {interpreter.key() for interpreter in _functorch.get_interpreter_stack() or ()}
    if _functorch.TransformType.Vmap in kinds:
        return "vmap"
    return "torch.func.grad" if _functorch.TransformType.Grad in kinds else ""


# torch.compile calls this while it traces, and takes the result as constant: it traces each vmap anew. This is what
# torch.compiler.assume_constant_result does, without importing the compiler.
_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _requires_grad(value: Any) -> bool:
    """Say whether a tensor, or one that it wraps, requires grad."""
    if not isinstance(value, torch.Tensor):
        return False
    while not value.requires_grad and _functorch.is_functorch_wrapped_tensor(value):
        value = _functorch.get_unwrapped(value)
    return value.requires_grad
