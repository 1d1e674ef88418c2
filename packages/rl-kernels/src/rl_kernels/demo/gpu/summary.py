"""A twin's run in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rl_kernels.demo.gpu.train import StepMetrics
from rl_kernels.demo.measures import Gap


@dataclass(frozen=True)
class Summary:
    """What a run comes to. Kernels are compiled in the first step, so times are of the others, if there are any.

    What is None was not measured.

    Attributes:
        reward: mean of the last tenth of the steps.
        solved: share of answers there that earned the whole reward.
        kl: of training from rollout, mean over the steps, nats a token.
        largest_kl: of all steps.
        ratios_off: share of all tokens whose ratio was not 1 in the first training pass.
        clip_fraction: mean over the steps.
        rollout_ms: median of the steps.
        update_ms: median of the steps.
        rollout_seconds: sum over the steps.
        update_seconds: sum over the steps.
        seconds: sum over the steps, with rewards and measures.
        first_seconds: the first step.
        mismatches: share of all tokens whose log-probability differed in any bit.
        largest: largest ``|ratio - 1|`` of all steps, in the first training pass.
        fp32_mismatches: share of the tokens that were measured in FP32 and differed there in any bit.
        fp32_kl: mean over the steps that measured it, nats a token.
        fp32_largest: of all steps that measured it.
    """

    reward: float
    solved: float
    kl: float
    largest_kl: float
    ratios_off: float
    clip_fraction: float
    rollout_ms: float
    update_ms: float
    rollout_seconds: float
    update_seconds: float
    seconds: float
    first_seconds: float
    mismatches: float
    largest: float
    fp32_mismatches: float | None = None
    fp32_kl: float | None = None
    fp32_largest: float | None = None


def summarised(history: Sequence[StepMetrics]) -> Summary:
    """Return the summary of at least one step."""
    last, warm = history[-max(1, len(history) // 10) :], history[1:] or history
    rollouts, updates = ([getattr(step, f"{part}_seconds") for step in warm] for part in ("rollout", "update"))
    return Summary(
        reward=fmean(step.reward for step in last),
        solved=fmean(step.solved for step in last),
        kl=fmean(step.kl for step in history),
        largest_kl=max(step.kl for step in history),
        ratios_off=share("ratios_off", history),
        clip_fraction=fmean(step.clip_fraction for step in history),
        rollout_ms=1000 * median(rollouts),
        update_ms=1000 * median(updates),
        rollout_seconds=sum(rollouts),
        update_seconds=sum(updates),
        seconds=sum(step.seconds for step in warm),
        first_seconds=history[0].seconds,
        mismatches=share("mismatches", history),
        largest=max(step.largest for step in history),
        **_in_fp32([step.fp32 for step in history if step.fp32 is not None]),
    )


def share(name: str, steps: Sequence[Any]) -> float:
    """Return the share of the tokens of all steps that a count of each step says."""
    return sum(getattr(step, name) for step in steps) / sum(step.tokens for step in steps)


def _in_fp32(found: Sequence[Gap]) -> dict[str, float]:
    if not found:
        return {}
    return {
        "fp32_mismatches": share("mismatches", found),
        "fp32_kl": fmean(gap.kl for gap in found),
        "fp32_largest": max(gap.largest for gap in found),
    }
