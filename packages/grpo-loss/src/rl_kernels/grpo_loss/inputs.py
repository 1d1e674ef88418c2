"""The inputs of a loss: their checks, and the form in which the raw ops take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.ops import define_check
from rl_kernels.core.torchlib.scalars import scalars
from rl_kernels.grpo_loss.advantages import boundaries_of
from rl_kernels.grpo_loss.call import Estimator, LossCall
from rl_kernels.grpo_loss.extras import Divisor, check_count
from rl_kernels.grpo_loss.objective import Objective

MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *check.FLOATS)


class Inputs(NamedTuple):
    """What a public function is given besides its options; tensors are as in ``LossCall``.

    Attributes:
        scored: ``rewards`` or ``advantages``: what the scores are.
        scores: one per sequence; advantages may be one per token.
        samples: size of the groups of rewards, or None.
        boundaries: offsets of the groups of rewards, or None; a tensor after ``resolved``.
        max_seqlen: T of packed sequences, or None; an integer after ``resolved``.
        given_count: the tensor that sums are divided by, or None.
    """

    current_logps: torch.Tensor
    old_logps: torch.Tensor | None
    ref_logps: torch.Tensor | None
    mask: torch.Tensor
    scored: str
    scores: torch.Tensor
    samples: int | None
    boundaries: Sequence[int] | torch.Tensor | None
    rollout_ratio: torch.Tensor | None
    entropy: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    max_seqlen: int | None
    given_count: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.current_logps.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


class Options(NamedTuple):
    """What a raw op is given besides its inputs: the last arguments of ``LossCall``, and whether a KL is computed."""

    numbers: torch.Tensor
    plan: str
    estimator: str
    with_metrics: bool
    has_kl: bool


def resolved(inputs: Inputs, divisor: Divisor, values: bool) -> Inputs:
    """Return the inputs with the values that only tensors or lists tell; ``values`` also checks offsets of groups."""
    current, count = inputs.current_logps, divisor.tensor
    check.tensor("current_logps", current, check.FLOATS, ndim=2 if inputs.cu_seqlens is None else 1)
    if inputs.cu_seqlens is not None:
        _check_offset_tensor(inputs)
    if divisor.number == 0:
        # As a tensor, because the raw ops read the number 0 as no divisor.
        count = current.new_zeros(())
    boundaries, max_seqlen = inputs.boundaries, inputs.max_seqlen
    if boundaries is not None:
        _check_rewards(inputs)
        boundaries = boundaries_of(inputs.scores, inputs.samples, boundaries, values=values)
    if inputs.cu_seqlens is not None and max_seqlen is None:
        max_seqlen = _longest(inputs.cu_seqlens)
    return inputs._replace(boundaries=boundaries, max_seqlen=max_seqlen, given_count=count)


def check_inputs(inputs: Inputs, objective: Objective, divisor_name: str) -> None:
    """Check all that depends on the kinds of resolved inputs, except the groups.

    Raises:
        TypeError, ValueError: an input is not as the public functions describe it; the message names it.
    """
    current, cu_seqlens = inputs.current_logps, inputs.cu_seqlens
    check.tensor("current_logps", current, check.FLOATS, ndim=2 if cu_seqlens is None else 1)
    if cu_seqlens is None and inputs.max_seqlen is not None:
        raise ValueError(f"max_seqlen: expected None without cu_seqlens, got {inputs.max_seqlen}")
    if cu_seqlens is not None:
        _check_offset_tensor(inputs)
        check.integer("max_seqlen", inputs.max_seqlen, least=0, most=check.INT32)
    if inputs.scored == "rewards":
        _check_rewards(inputs)
    else:
        _check_scores("advantages", inputs.scores, inputs)
    check.same_device(current_logps=current, **{inputs.scored: inputs.scores})
    beta, rollout = objective.numbers.beta, objective.plan.rollout
    if inputs.ref_logps is None and beta > 0:
        raise ValueError(f"ref_logps: expected a tensor with beta > 0 (beta is {beta}), got None")
    _check_tokens(inputs)
    if inputs.rollout_ratio is None and rollout != "given":
        raise ValueError(f"rollout_mode: expected None without rollout_ratio, got {rollout!r}")
    if inputs.rollout_ratio is not None:
        _check_scores("rollout_ratio", inputs.rollout_ratio, inputs)
    check.same_device(current_logps=current, rollout_ratio=inputs.rollout_ratio, **{divisor_name: inputs.given_count})


def _check_rewards(inputs: Inputs) -> None:
    check.tensor("rewards", inputs.scores, check.FLOATS, ndim=1)
    check.shape("rewards", inputs.scores, (inputs.batch,), "one per sequence of current_logps")


def _check_tokens(inputs: Inputs) -> None:
    """Check the tensors with one value per token."""
    current, mask = inputs.current_logps, inputs.mask
    optional = {"old_logps": inputs.old_logps, "ref_logps": inputs.ref_logps, "entropy": inputs.entropy}
    for name, value in optional.items():
        if value is not None:
            check.tensor(name, value, check.FLOATS)
            check.shape(name, value, current.shape, "that of current_logps")
    check.tensor("completion_mask", mask, MASKS)
    check.shape("completion_mask", mask, current.shape, "that of current_logps")
    check.same_device(current_logps=current, **optional, completion_mask=mask)


def _check_scores(name: str, value: torch.Tensor, inputs: Inputs) -> None:
    """Check a tensor with one value per sequence or per token."""
    check.tensor(name, value, check.FLOATS, least=1)
    expected: tuple[int, ...] = (inputs.batch,)
    if value.ndim != 1 or (inputs.cu_seqlens is not None and value.shape != expected):
        expected = inputs.current_logps.shape
    check.shape(name, value, expected, "one per sequence or per token of current_logps")


def check_values(inputs: Inputs, divisor: Divisor | None) -> None:
    """Check the values of tensors, except the offsets of groups; none are read while they are hidden."""
    mask, cu_seqlens = inputs.mask, inputs.cu_seqlens
    if cu_seqlens is not None and not values_hidden(cu_seqlens):
        _check_offsets(cu_seqlens, inputs.current_logps.shape[0], inputs.max_seqlen)
    if mask.dtype != torch.bool and not values_hidden(mask):
        _check_mask(mask)
    if divisor is not None and inputs.given_count is not None and not values_hidden(inputs.given_count):
        check_count(inputs.given_count, mask, divisor.name)


def options_of(inputs: Inputs, objective: Objective, divisor: Divisor, return_metrics: bool) -> Options:
    """Return the options of a call."""
    is_grouped = inputs.scored == "rewards"
    estimator = objective.estimator if is_grouped else Estimator()
    numbers = objective.numbers._replace(
        eps=objective.eps if is_grouped else 0.0, divisor=divisor.number or 0.0, length=divisor.length
    )
    plan = objective.plan._replace(divisor="given" if divisor.number else "counted")
    return Options(scalars(*numbers), plan.text, estimator.text, return_metrics, numbers.beta != 0)


def call_of(inputs: Inputs, options: Options) -> LossCall:
    """Return the call of a raw op."""
    # A list, because a generator takes longer. Only current_logps gets a gradient.
    detached = [x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in inputs[1:]]
    inputs = Inputs._make([inputs.current_logps, *detached])
    scores, ratio, boundaries = inputs.scores, inputs.rollout_ratio, inputs.boundaries
    if inputs.cu_seqlens is not None:
        # Raw ops take one value per packed token as [1, total].
        scores = scores if scores.shape == (inputs.batch,) else scores[None]
        ratio = ratio if ratio is None or ratio.shape == (inputs.batch,) else ratio[None]
    assert boundaries is None or isinstance(boundaries, torch.Tensor)
    return LossCall(
        inputs.current_logps,
        inputs.old_logps,
        inputs.ref_logps if options.has_kl else None,
        scores if inputs.scored == "rewards" else None,
        boundaries,
        inputs.samples or 0,
        None if inputs.scored == "rewards" else scores,
        inputs.mask,
        ratio,
        inputs.entropy if options.with_metrics else None,
        inputs.given_count,
        inputs.cu_seqlens,
        inputs.max_seqlen or 0,
        *options[:4],
    )


def _check_offset_tensor(inputs: Inputs) -> None:
    check.tensor("cu_seqlens", inputs.cu_seqlens, check.INTEGERS, ndim=1)
    assert inputs.cu_seqlens is not None
    if not inputs.cu_seqlens.shape[0]:
        raise ValueError("cu_seqlens: expected at least 1 offset, got 0")
    check.same_device(current_logps=inputs.current_logps, cu_seqlens=inputs.cu_seqlens)


def _longest(cu_seqlens: torch.Tensor) -> int:
    if values_hidden(cu_seqlens):
        raise ValueError("max_seqlen: expected an integer under torch.compile and graph capture, got None")
    return max(int(cu_seqlens.diff().max()), 0) if cu_seqlens.shape[0] > 1 else 0


def _zero_or_one(mask: torch.Tensor) -> None:
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.numel():
        raise ValueError(f"completion_mask: expected values 0 and 1, got {wrong[0].item()}")


def _offsets(cu_seqlens: torch.Tensor, total: int, longest: int) -> None:
    lengths = cu_seqlens.diff()
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != total or bool((lengths < 0).any()):
        raise ValueError(
            f"cu_seqlens: expected offsets that rise from 0 to {total} and never fall, got first {first}, last {last}"
        )
    if bool((lengths > longest).any()):
        raise ValueError(f"max_seqlen: expected at least {int(lengths.max())}, the longest sequence, got {longest}")


_check_mask = define_check("check_completion_mask", "(Tensor mask)", _zero_or_one)
_check_offsets = define_check("check_cu_seqlens", "(Tensor cu_seqlens, SymInt total, SymInt longest)", _offsets)
