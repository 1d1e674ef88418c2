"""Builds and runs the raw op's call from checked arguments, for both loss functions; has the autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.dispatch import choose
from rl_kernels.core.saved import are_hooked
from rl_kernels.core.torchlib.derivatives import first_order, may_overwrite, no_lost_derivatives
from rl_kernels.core.torchlib.observed import ops_are_observed
from rl_kernels.core.torchlib.scalars import scalars
from rl_kernels.grpo_loss.arguments import Layout
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.estimator import Estimator
from rl_kernels.grpo_loss.extras import Normalizer, divisor_of, tensor_of
from rl_kernels.grpo_loss.objective import Objective
from rl_kernels.grpo_loss.op import OPERATOR, describe, ops
from rl_kernels.grpo_loss.outputs import GRPOLossOutput, LossAndMetrics
from rl_kernels.grpo_loss.ranks import Batch, combined

Scores = tuple[torch.Tensor | None, torch.Tensor | None, int, torch.Tensor | None]
"""Rewards, boundaries of their groups, size of their groups, and advantages."""


CallOf = Callable[[Scores, Estimator, float], LossCall]
"""Builds a call from its scores, its estimator and eps."""


class Tokens(NamedTuple):
    """The tensors of a call besides current_logps and the rewards or advantages."""

    old_logps: torch.Tensor | None
    ref_logps: torch.Tensor | None
    mask: torch.Tensor
    rollout_ratio: torch.Tensor | None
    entropy: torch.Tensor | None


class Options(NamedTuple):
    """The divisor of a call, whether it returns metrics, and whether values are checked."""

    normalizer: Normalizer
    return_metrics: bool
    validate: bool


def prepare(
    current_logps: torch.Tensor, tokens: Tokens, layout: Layout, objective: Objective, options: Options
) -> CallOf:
    """Check the remaining arguments; return a function of scores, estimator and eps that builds the call."""
    formula, numbers = objective.plan, objective.numbers
    divisor = divisor_of(objective.loss_type, options.normalizer)
    old, ref, mask, rollout, entropy = tokens
    if ref is None and numbers.beta > 0:
        raise ValueError(f"ref_logps: expected a tensor with beta > 0 (beta is {numbers.beta}), got None")
    layout.tokens(current_logps, mask, options.validate, old_logps=old, ref_logps=ref, entropy=entropy)
    if rollout is None and formula.rollout != "given":
        raise ValueError(f"rollout_mode: expected None without rollout_ratio, got {formula.rollout!r}")
    ratio = None if rollout is None else layout.scores("rollout_ratio", rollout)
    check.same_device(current_logps=current_logps, rollout_ratio=ratio)
    divisor_tensor = tensor_of(divisor, current_logps, mask, options.validate)
    check.flag("return_metrics", options.return_metrics)

    def call_of(scores: Scores, estimator: Estimator, eps: float) -> LossCall:
        return LossCall(
            current_logps,
            None if old is None else old.detach(),
            None if ref is None or numbers.beta == 0 else ref.detach(),
            *scores,
            mask.detach(),
            ratio,
            None if entropy is None or not options.return_metrics else entropy.detach(),
            divisor_tensor,
            layout.cu_seqlens,
            layout.max_seqlen,
            scalars(*numbers._replace(eps=eps, divisor=divisor.number or 0.0, length=divisor.length)),
            formula.text,
            estimator.text,
            options.return_metrics,
        )

    return call_of


def run(call: LossCall, backend: str | None) -> GRPOLossOutput | LossAndMetrics:
    """Return the loss of a checked call."""
    return run_on(call, choose(OPERATOR, describe(call.current_logps), backend).name)


def run_on(call: LossCall, backend: str, batch: Batch | None = None) -> GRPOLossOutput | LossAndMetrics:
    """Return the loss of a checked call on a backend, over the ranks of ``batch`` if that is given."""
    current_logps, *arguments = *call, backend
    if call.current_logps.requires_grad and torch.is_grad_enabled():
        loss, policy_loss, kl, metrics = _GRPOLoss.apply(current_logps, tuple(arguments), batch)
    elif batch is None:
        loss, policy_loss, kl, metrics = ops["forward"](current_logps, *arguments)
    else:
        loss, policy_loss, kl, metrics, _ = combined(batch, ops["sums"](*call, backend), call, backend)
    output = GRPOLossOutput(loss, policy_loss, kl)
    return LossAndMetrics(output, metrics) if call.with_metrics else output


class LossPlan(NamedTuple):
    """A plan for one kind of arguments.

    Attributes:
        launches: ``forward`` and ``backward`` of a backend, or None if it has no plan: its op runs.
        backend: name of the backend.
        has_ref: whether ref_logps are read.
        samples: size of the groups of rewards; 0 if advantages are given.
        options: arguments of the call after the mask; no tensor of the caller is among them.
    """

    launches: Any
    backend: str
    has_ref: bool
    samples: int
    options: tuple[Any, ...]

    def call_of(self, current_logps: torch.Tensor, *tensors: torch.Tensor | None) -> LossCall:
        """Return the call with these tensors, which have the layout of the planned call."""
        old, ref, scores, mask = (x.detach() if x is not None and x.requires_grad else x for x in tensors)
        scored = (scores, None, self.samples, None) if self.samples else (None, None, 0, scores)
        return LossCall._make((current_logps, old, ref if self.has_ref else None, *scored, mask, *self.options))


def plan_of(call: LossCall, backend: str | None) -> LossPlan:
    """Return the plan of a checked call without boundaries and extras."""
    name = choose(OPERATOR, describe(call.current_logps), backend).name
    make = getattr(OPERATOR.backend(name).load(), "planned", None)
    return LossPlan(make(call) if make else None, name, call.ref_logps is not None, call.samples, call[8:])


def run_planned(name: str, plan: LossPlan, *tensors: torch.Tensor | None) -> GRPOLossOutput | LossAndMetrics:
    """Return the loss of a planned call.

    Args:
        name: name of the public function, for messages.
        plan: plan for arguments of this kind.
        tensors: current_logps, old_logps, ref_logps, rewards or advantages, mask; only the first gets a gradient.
    """
    no_lost_derivatives(name, *tensors)
    current_logps, *inputs = tensors
    assert current_logps is not None
    if plan.launches is None:
        return run_on(plan.call_of(current_logps, *inputs), plan.backend)
    if current_logps.requires_grad and torch.is_grad_enabled():
        return GRPOLossOutput(*_PlannedLoss.apply(current_logps, tuple(inputs), plan))
    loss, policy_loss, kl, *_ = plan.launches.forward(current_logps, *inputs, needs_slope=False)
    return GRPOLossOutput(loss, policy_loss, kl)


class _GRPOLoss(torch.autograd.Function):
    """Saves the slope and the divisor that forward computes; only current_logps gets a gradient.

    The other arguments are one tuple, so that autograd does not inspect each.
    """

    @staticmethod
    def forward(
        ctx: Any, current_logps: torch.Tensor, arguments: tuple[Any, ...], batch: Batch | None
    ) -> tuple[torch.Tensor, ...]:
        if batch is None:
            loss, policy_loss, kl, metrics, divisor, slope = ops["forward_grad"](current_logps, *arguments)
        else:
            sums, slope = ops["sums_grad"](current_logps, *arguments)
            call = LossCall(current_logps, *arguments[:-1])
            loss, policy_loss, kl, metrics, divisor = combined(batch, sums, call, arguments[-1])
        # current_logps is saved only to stay in the graph: otherwise a second derivative would silently be 0.
        ctx.save_for_backward(current_logps, divisor, slope)
        ctx.mark_non_differentiable(policy_loss, kl, metrics)
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.owns_slope = arguments[-1], not are_hooked()
        return loss, policy_loss, kl, metrics

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, None, None]:
        if upstream is None:
            return None, None, None
        # Read once: a checkpoint unpacks a saved tensor only once.
        saved = ctx.saved_tensors
        overwrite = ctx.owns_slope and may_overwrite(saved[2])
        return _gradient(saved, upstream, ctx.backend, overwrite=overwrite), None, None


def _gradient(
    saved: tuple[torch.Tensor, ...], upstream: torch.Tensor, backend: str, *, overwrite: bool
) -> torch.Tensor:
    """Return the gradient, with ``overwrite`` in the memory of the slope if it fits."""
    current_logps, divisor, slope = saved
    if not overwrite or current_logps.dtype != slope.dtype or not slope.is_contiguous():
        return first_order(ops["backward"], current_logps, divisor, slope, upstream, backend)
    no_lost_derivatives("grpo_loss", slope, upstream)
    ops["backward_inplace"](slope, divisor, upstream, backend)
    return slope


class _PlannedLoss(torch.autograd.Function):
    """Like ``_GRPOLoss``, with the planned launches; a backward pass that does not fit the plan runs the op."""

    @staticmethod
    def forward(
        ctx: Any, current_logps: torch.Tensor, inputs: tuple[torch.Tensor | None, ...], plan: LossPlan
    ) -> tuple[torch.Tensor, ...]:
        loss, policy_loss, kl, divisor, slope = plan.launches.forward(current_logps, *inputs, needs_slope=True)
        ctx.save_for_backward(current_logps, divisor, slope)
        ctx.mark_non_differentiable(policy_loss, kl)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.owns_slope = plan, not are_hooked()
        return loss, policy_loss, kl

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, None, None]:
        if upstream is None:
            return None, None, None
        # Read once: a checkpoint unpacks a saved tensor only once.
        saved = ctx.saved_tensors
        no_lost_derivatives("grpo_loss", *saved, upstream)
        grad, overwrite = None, ctx.owns_slope and may_overwrite(saved[2])
        # A gradient that could be differentiated again takes the general path, which raises.
        if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or ops_are_observed()):
            grad = ctx.plan.launches.backward(*saved, upstream, overwrite=overwrite)
        if grad is None:
            grad = _gradient(saved, upstream, ctx.plan.backend, overwrite=overwrite)
        return grad, None, None
