"""Prepares and runs the loss of checked inputs, for all public functions; has the autograd function of the losses."""

from __future__ import annotations

from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.saved import are_hooked
from rl_kernels.core.torchlib.derivatives import apply_of, first_order, may_overwrite, no_lost_derivatives
from rl_kernels.core.torchlib.scalars import scalars
from rl_kernels.grpo_loss.advantages import advantages_of_rank, check_groups
from rl_kernels.grpo_loss.call import INPUTS, UNSET, Estimator, LossCall
from rl_kernels.grpo_loss.extras import NO_NORMALIZER, Divisor, Normalizer, divisor_of
from rl_kernels.grpo_loss.inputs import check_inputs, check_values, resolved
from rl_kernels.grpo_loss.objective import Objective, with_overrides
from rl_kernels.grpo_loss.op import OPERATOR, describe, ops
from rl_kernels.grpo_loss.outputs import GRPOLossOutput, LossAndMetrics
from rl_kernels.grpo_loss.ranks import Batch, Sizes, agreed, combined, shared_groups, shared_kinds, shared_options

Options = tuple[torch.Tensor, str, str, bool]
"""The last members of a ``LossCall``: numbers, plan, estimator, with_metrics."""


def checked_call(
    name: str,
    step: str,
    inputs: LossCall,
    objective: Objective,
    normalizer: Normalizer,
    return_metrics: bool,
    validate: bool,
    backend: str | None,
) -> tuple[LossCall, Ready]:
    """Check the arguments of a public function; return the call of a raw op, and what is prepared for it.

    Args:
        name: name of the public function, for messages.
        step: ``forward`` or ``sums``: the op that is called, with ``_grad`` after it if the call needs a gradient;
            empty if it is not prepared, because the groups of the rewards are those of all ranks.
        inputs: what the function was given.
        objective: the loss.
        normalizer: the count that sums are divided by.
        return_metrics: whether metrics are computed.
        validate: whether values of tensors are checked.
        backend: the argument of the public function.
    """
    divisor = None
    if normalizer is not NO_NORMALIZER or inputs.boundaries is not None or inputs.cu_seqlens is not None:
        divisor = divisor_of(objective.loss_type, normalizer)
        inputs = resolved(inputs, divisor, validate)
    if step and torch.is_grad_enabled() and getattr(inputs[0], "requires_grad", False):
        step += "_grad"
    scored = "rewards" if name == "grpo_loss" else "advantages"
    ready, options = _prepare(step, scored, objective, return_metrics, backend, *inputs[:INPUTS])
    if normalizer is not NO_NORMALIZER and divisor is not None:
        options = _options(scored, objective, divisor, return_metrics)
    if validate:
        check_values(inputs, divisor)
    no_lost_derivatives(name, *inputs, *normalizer)
    return _call(inputs, objective, options), ready


@remembered
def _prepare(
    step: str, scored: str, objective: Objective, return_metrics: bool, backend: str | None, *members: Any
) -> tuple[Ready, Options]:
    """Check all that depends on the kinds of the arguments, and choose a backend; ``members`` are the inputs."""
    inputs, divisor = LossCall._make((*members, *UNSET)), divisor_of(objective.loss_type, NO_NORMALIZER)
    check_inputs(inputs, scored, objective, divisor.name)
    check.flag("return_metrics", return_metrics)
    check.backend_name(backend)
    if scored == "rewards" and step:
        check_groups(inputs.batch, inputs.samples, inputs.boundaries)
    options = _options(scored, objective, divisor, return_metrics)
    chosen = choose(OPERATOR, describe(inputs.current_logps), backend).name
    ready = ops[step].ready(*_call(inputs, objective, options), chosen) if step else Ready(chosen)
    return ready, options


def _options(scored: str, objective: Objective, divisor: Divisor, return_metrics: bool) -> Options:
    estimator, eps = (objective.estimator, objective.eps) if scored == "rewards" else (Estimator(), 0.0)
    numbers = objective.numbers._replace(eps=eps, divisor=divisor.number or 0.0, length=divisor.length)
    return scalars(*numbers), objective.plan.text, estimator.text, return_metrics


def _call(inputs: LossCall, objective: Objective, options: Options) -> LossCall:
    """Return the call of a raw op. Only current_logps gets a gradient."""
    cu_seqlens = inputs.cu_seqlens
    tensors = (inputs.old_logps, inputs.ref_logps, inputs.rewards, inputs.advantages, inputs.mask)
    old, ref, rewards, advantages, mask, ratio, entropy, count = [
        x.detach() if x is not None and x.requires_grad else x
        for x in (*tensors, inputs.rollout_ratio, inputs.entropy, inputs.normalizer)
    ]
    if cu_seqlens is not None:
        # Raw ops take one value per packed token as [1, total].
        by_sequence = (inputs.batch,)
        advantages = advantages if advantages is None or advantages.shape == by_sequence else advantages[None]
        ratio = ratio if ratio is None or ratio.shape == by_sequence else ratio[None]
    tokens = inputs.current_logps, old, ref if objective.beta else None
    scores = rewards, inputs.boundaries, inputs.samples or 0, advantages
    extras = ratio, entropy if options[3] else None, count
    return LossCall._make((*tokens, *scores, mask, *extras, cu_seqlens, inputs.max_seqlen or 0, *options))


def loss_of(call: LossCall, ready: Ready, batch: Batch | None = None) -> GRPOLossOutput | LossAndMetrics:
    """Return the loss of a checked call; with ``batch`` that of its ranks."""
    if call.current_logps.requires_grad and torch.is_grad_enabled():
        outputs = apply_of(_GRPOLoss, ready)(call[0], (call[1:], ready, batch))
    elif batch is None:
        outputs = ops["forward"].call(ready, *call)
    else:
        *outputs, _ = combined(batch, ops["sums"].call(ready, *call), call, ready.backend)
    loss, policy_loss, kl, metrics = outputs
    output = GRPOLossOutput(loss, policy_loss, kl)
    return LossAndMetrics(output, metrics) if call.with_metrics else output


class _GRPOLoss(torch.autograd.Function):
    """Saves the slope and the divisor that forward computes; only current_logps gets a gradient.

    All that it is computed with besides current_logps is one tuple, because autograd inspects every argument.
    """

    @staticmethod
    def forward(
        ctx: Any, current_logps: torch.Tensor, settings: tuple[tuple[Any, ...], Ready, Batch | None]
    ) -> tuple[torch.Tensor, ...]:
        arguments, ready, batch = settings
        if batch is None:
            outputs = ops["forward_grad"].call(ready, current_logps, *arguments)
            loss, policy_loss, kl, metrics, divisor, slope = outputs
        else:
            sums, slope = ops["sums_grad"].call(ready, current_logps, *arguments)
            call = LossCall(current_logps, *arguments)
            loss, policy_loss, kl, metrics, divisor = combined(batch, sums, call, ready.backend)
        # current_logps is saved only to stay in the graph: otherwise a second derivative would silently be 0.
        ctx.save_for_backward(current_logps, divisor, slope)
        ctx.mark_non_differentiable(policy_loss, kl, metrics)
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.owns_slope = ready.backend, not are_hooked()
        return loss, policy_loss, kl, metrics

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, None]:
        if upstream is None:
            return None, None
        # Read once: a checkpoint unpacks a saved tensor only once.
        current_logps, divisor, slope = ctx.saved_tensors
        may_reuse = ctx.owns_slope and current_logps.dtype == slope.dtype and slope.is_contiguous()
        if not may_reuse or not may_overwrite(slope):
            return first_order(ops["backward"], current_logps, divisor, slope, upstream, ctx.backend), None
        no_lost_derivatives("grpo_loss", slope, upstream)
        ops["backward_inplace"](slope, divisor, upstream, ctx.backend)
        return slope, None


# Calls of other ranks cannot be traced. torch.compiler.disable would do, but it imports the compiler at once.
@_disable_dynamo
def loss_over_ranks(
    name: str,
    process_group: ProcessGroup | DeviceMesh,
    inputs: LossCall,
    objective_arguments: tuple[Any, Any, Any, Any],
    normalizer: Normalizer,
    return_metrics: bool,
    validate: bool,
    backend: str | None,
) -> GRPOLossOutput | LossAndMetrics:
    """Return the loss of the batch of all ranks.

    Args:
        name: name of the public function.
        process_group: its ranks, in order, hold the sequences.
        inputs: what this rank was given; its groups are those of the rewards of all ranks.
        objective_arguments: objective, loss_type, beta and clip_eps.
        normalizer: as in the public function, and so are the arguments that follow.
        return_metrics: of the batch.
        validate: whether values are checked.
        backend: the argument of the public function.
    """
    grouping, own = (inputs.samples, inputs.boundaries), inputs._replace(samples=0, boundaries=None)

    def check_here(compares: bool) -> tuple[tuple[LossCall, Objective, Ready], Sizes, dict[str, object]]:
        objective = with_overrides(*objective_arguments)
        call, ready = checked_call(name, "", own, objective, normalizer, return_metrics, validate, backend)
        shared: dict[str, object] = {}
        if compares:
            shared = {"backend": ready.backend, **shared_options(objective, normalizer)}
            shared |= {"return_metrics": return_metrics, **shared_kinds(inputs), **shared_groups(grouping)}
        return (call, objective, ready), Sizes(call.batch, call.length), shared

    (call, objective, ready), batch = agreed(name, process_group, check_here, validate)
    if call.rewards is not None:
        # The dtype in which one process computes the advantages.
        rewards = call.rewards.to(torch.promote_types(call.rewards.dtype, call.current_logps.dtype))
        estimator = (objective.eps, objective.estimator)
        advantages = advantages_of_rank(batch, rewards, grouping, *estimator, validate, ready.backend)
        call = call._replace(rewards=None, advantages=advantages)
    return loss_of(call, ready, batch)
