"""Prepares and runs the loss of checked inputs, for all public functions; has the autograd function of the losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.saved import are_hooked
from rl_kernels.core.torchlib.derivatives import first_order, may_overwrite, no_lost_derivatives
from rl_kernels.grpo_loss.advantages import advantages_of_rank, check_groups
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.extras import NO_NORMALIZER, Normalizer, divisor_of
from rl_kernels.grpo_loss.inputs import Inputs, Options, call_of, check_inputs, check_values, options_of, resolved
from rl_kernels.grpo_loss.objective import Objective, with_overrides
from rl_kernels.grpo_loss.op import OPERATOR, describe, ops
from rl_kernels.grpo_loss.outputs import GRPOLossOutput, LossAndMetrics
from rl_kernels.grpo_loss.ranks import (
    Batch,
    Sizes,
    agreed,
    combined,
    shared_groups,
    shared_kinds,
    shared_options,
)


def checked_call(
    name: str,
    inputs: Inputs,
    objective: Objective,
    normalizer: Normalizer,
    return_metrics: bool,
    validate: bool,
    backend: str | None,
    *,
    step: str = "forward",
) -> tuple[LossCall, Ready]:
    """Check the arguments of a public function; return the call of a raw op, and what is prepared for it.

    Args:
        name: name of the public function, for messages.
        inputs: what it was given.
        objective: the loss.
        normalizer: the count that sums are divided by.
        return_metrics: whether metrics are computed.
        validate: whether values of tensors are checked.
        backend: the argument of the public function.
        step: ``forward`` or ``sums``: the op that is called, with ``_grad`` after it if the call needs a gradient.
    """
    divisor = None
    if normalizer is not NO_NORMALIZER or inputs.boundaries is not None or inputs.cu_seqlens is not None:
        divisor = divisor_of(objective.loss_type, normalizer)
        inputs = resolved(inputs, divisor, validate)
    is_given = divisor is not None and bool(divisor.number)
    op = f"{step}_grad" if torch.is_grad_enabled() and getattr(inputs[0], "requires_grad", False) else step
    ready, options = _prepare(op, *inputs, objective, is_given, return_metrics, backend)
    if normalizer is not NO_NORMALIZER and divisor is not None:
        options = options_of(inputs, objective, divisor, return_metrics)
    if validate:
        check_values(inputs, divisor)
    no_lost_derivatives(name, *inputs, *normalizer)
    return call_of(inputs, options), ready


@remembered
def _prepare(op: str, *args: Any) -> tuple[Ready, Options]:
    """Check all that depends on the kinds of the arguments, and choose a backend.

    Args:
        op: name of the raw op that is called.
        args: the resolved ``Inputs``, the objective, whether its divisor is given as a number, return_metrics, backend.
    """
    *given, objective, is_given, return_metrics, backend = args
    inputs = Inputs._make(given)
    divisor = divisor_of(objective.loss_type, NO_NORMALIZER)
    check_inputs(inputs, objective, divisor.name)
    check.flag("return_metrics", return_metrics)
    check.backend_name(backend)
    if inputs.scored == "rewards":
        check_groups(inputs.batch, inputs.samples, inputs.boundaries)
    # Any number stands for the one that is given: it is not part of the kind.
    options = options_of(inputs, objective, divisor._replace(number=1.0 if is_given else None), return_metrics)
    chosen = choose(OPERATOR, describe(inputs.current_logps), backend).name
    return ops[op].ready(*call_of(inputs, options), chosen), options


class _Settings(NamedTuple):
    """What a loss is computed with besides current_logps; one tuple, because autograd inspects every argument."""

    arguments: tuple[Any, ...]
    ready: Ready
    batch: Batch | None


def loss_of(call: LossCall, ready: Ready, batch: Batch | None = None) -> GRPOLossOutput | LossAndMetrics:
    """Return the loss of a checked call; with ``batch`` that of its ranks."""
    current_logps, *arguments = call
    if current_logps.requires_grad and torch.is_grad_enabled():
        outputs = _GRPOLoss.apply(current_logps, _Settings(tuple(arguments), ready, batch))
    elif batch is None:
        outputs = ops["forward"].call(ready, *call)
    else:
        *outputs, _ = combined(batch, ops["sums"].call(ready, *call), call, ready.backend)
    loss, policy_loss, kl, metrics = outputs
    output = GRPOLossOutput(loss, policy_loss, kl)
    return LossAndMetrics(output, metrics) if call.with_metrics else output


class _GRPOLoss(torch.autograd.Function):
    """Saves the slope and the divisor that forward computes; only current_logps gets a gradient."""

    @staticmethod
    def forward(ctx: Any, current_logps: torch.Tensor, settings: _Settings) -> tuple[torch.Tensor, ...]:
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
    inputs: Inputs,
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
    grouping = (inputs.samples, inputs.boundaries)

    def check_here() -> tuple[tuple[LossCall, Objective, str], Sizes]:
        objective = with_overrides(*objective_arguments)
        divisor = divisor_of(objective.loss_type, normalizer)
        own = resolved(inputs._replace(samples=None, boundaries=None), divisor, validate)
        check_inputs(own, objective, divisor.name)
        check.flag("return_metrics", return_metrics)
        check.backend_name(backend)
        if validate:
            check_values(own, divisor)
        no_lost_derivatives(name, *inputs, *normalizer)
        call = call_of(own, options_of(own, objective, divisor, return_metrics))
        chosen = choose(OPERATOR, describe(call.current_logps), backend).name
        return (call, objective, chosen), Sizes(call.batch, call.length)

    def shared(checked: tuple[LossCall, Objective, str]) -> dict[str, object]:
        _, objective, chosen = checked
        options = {**shared_options(objective, normalizer), "return_metrics": return_metrics}
        return {"backend": chosen, **options, **shared_kinds(inputs), **shared_groups(grouping)}

    (call, objective, chosen), batch = agreed(name, process_group, check_here, shared, validate)
    if call.rewards is not None:
        # The dtype in which one process computes the advantages.
        rewards = call.rewards.to(torch.promote_types(call.rewards.dtype, call.current_logps.dtype))
        estimator = (objective.eps, objective.estimator)
        advantages = advantages_of_rank(batch, rewards, grouping, *estimator, validate, chosen)
        call = call._replace(rewards=None, advantages=advantages)
    return loss_of(call, Ready(chosen), batch)
