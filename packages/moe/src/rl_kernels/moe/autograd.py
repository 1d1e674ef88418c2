"""The differentiable experts and routes: autograd Functions on the raw ops."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_kernels.core.calls import Ready
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import first_order, is_asked_for, no_lost_derivatives
from rl_kernels.moe.inputs import Inputs
from rl_kernels.moe.op import ops

SHARED = Inputs._fields.index("shared")
"""Place of ``shared``, the last tensor, which backward does not read."""


class Settings(NamedTuple):
    """What experts compute with besides tensors; one tuple, because autograd inspects every argument.

    Attributes:
        ready: the backend, and its launches of the forward pass.
        activation: its name.
        interleaved: whether rows of gate and up alternate.
        recompute: whether backward computes the first product again.
        main_grads: FP32 buffers of gate_up and down to which backward adds their gradients, or None.
    """

    ready: Ready
    activation: str
    interleaved: bool
    recompute: bool
    main_grads: tuple[torch.Tensor | None, torch.Tensor | None]


class Experts(torch.autograd.Function):
    """Experts of a mixture; saves hidden, and unless ``recompute`` the outputs of the first product."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        """Return the output ``[T, D]``; the arguments are the tensors of ``Inputs``, then ``Settings``."""
        *tensors, settings = arguments
        op = ops["forward" if settings.recompute else "forward_kept"]
        results = op.call(settings.ready, *tensors, settings.activation, settings.interleaved)
        out, z, order = (results, None, None) if settings.recompute else results
        save(ctx, *tensors[:SHARED], z, order)
        ctx.settings = settings
        # Autograd counts only the tensors.
        present = [x is not None for x in tensors]
        ctx.places = [sum(present[:number]) for number in range(len(present))]
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients; those of weights that were added to ``main_grad`` are None."""
        settings = ctx.settings
        inputs = zip(ctx.needs_input_grad, ctx.places, strict=False)
        asked = [is_needed and is_asked_for(ctx, place) for is_needed, place in inputs]
        hidden, gate_up, down, _, weights, gate_up_bias, down_bias, _ = asked
        needs = [hidden, weights, gate_up, down, gate_up_bias, down_bias]
        *tensors, z, order = ctx.saved_tensors
        arguments = (*tensors, None, settings.activation, settings.interleaved, grad, z, order)
        if any(buffer is not None for buffer in settings.main_grads):
            no_lost_derivatives("experts", *arguments)
            buffers = [
                buffer if is_needed else None
                for buffer, is_needed in zip(settings.main_grads, (gate_up, down), strict=True)
            ]
            needs[2:4] = [is_needed and buffer is None for is_needed, buffer in zip(needs[2:4], buffers, strict=True)]
            results = ops["backward_into"](*arguments, *buffers, needs, settings.ready.backend)
        else:
            results = first_order(ops["backward"], *arguments, needs, settings.ready.backend)
        dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = (
            result if is_needed else None for result, is_needed in zip(results, needs, strict=True)
        )
        # A copy: the caller may write to a gradient, and the upstream gradient is not ours.
        dshared = grad.clone() if ctx.needs_input_grad[SHARED] else None
        return dhidden, dgate_up, ddown, None, dweights, dgate_up_bias, ddown_bias, dshared, None


class RouteSettings(NamedTuple):
    """What routes are computed with besides tensors.

    Attributes:
        ready: the backend, and its launches of the product.
        out_dtype: dtype of the logits.
        choice: top_k, groups, groups that are kept, scoring, normalize and scale, as ``route_choose`` takes them.
        main_grad: FP32 buffer to which backward adds the gradient of the weight, or None.
    """

    ready: Ready
    out_dtype: torch.dtype
    choice: tuple[int, int, int, str, bool, float]
    main_grad: torch.Tensor | None = None


def choose_routes(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    settings: RouteSettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, weights and logits, without a gradient."""
    logits = ops["route_logits"].call(settings.ready, hidden, weight, bias, settings.out_dtype)
    ids, weights = ops["route_choose"](logits, correction_bias, ids, *settings.choice, settings.ready.backend)
    return ids, weights, logits


class Route(torch.autograd.Function):
    """Routes of a mixture; weights and logits are differentiable, ids are not."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        correction_bias: torch.Tensor | None,
        ids: torch.Tensor | None,
        settings: RouteSettings,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids, weights and logits."""
        # As in ``choose_routes``, with one frame less before a launch.
        logits = ops["route_logits"].call(settings.ready, hidden, weight, bias, settings.out_dtype)
        ids, weights = ops["route_choose"](logits, correction_bias, ids, *settings.choice, settings.ready.backend)
        save(ctx, hidden, weight, logits, ids)
        ctx.settings = settings
        ctx.mark_non_differentiable(ids)
        # Logits that no loss uses have no gradient to read.
        ctx.set_materialize_grads(False)
        return ids, weights, logits

    @staticmethod
    def backward(
        ctx: Any, _: None, grad_weights: torch.Tensor | None, grad_logits: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients; that of the weight is None if it was added to ``main_grad``."""
        hidden, weight, logits, ids = ctx.saved_tensors
        (backend, _), _, (*_, scoring, normalize, scale), main_grad = ctx.settings
        if grad_weights is None:
            grad_weights = logits.new_zeros(ids.shape, dtype=torch.float32)
        needs = [is_needed and is_asked_for(ctx, place) for place, is_needed in enumerate(ctx.needs_input_grad[:3])]
        arguments = (grad_weights, grad_logits, hidden, weight, logits, ids, scoring, normalize, scale)
        if main_grad is not None and needs[1]:
            no_lost_derivatives("route", *arguments)
            needs[1] = False
            results = ops["route_backward_into"](*arguments, main_grad, needs, backend)
        else:
            results = first_order(ops["route_backward"], *arguments, needs, backend)
        return *(x if is_needed else None for x, is_needed in zip(results, needs, strict=True)), None, None, None
