"""A twin's run in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rl_kernels.demo.gpu.train import StepMetrics


@dataclass(frozen=True)
class Summary:
    """What a run comes to. Kernels are compiled in the first step, so times are of the others, if there are any.

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


def summarised(history: Sequence[StepMetrics]) -> Summary:
    """Return the summary of at least one step."""
    last, warm = history[-max(1, len(history) // 10) :], history[1:] or history
    rollouts, updates = ([getattr(step, f"{part}_seconds") for step in warm] for part in ("rollout", "update"))
    return Summary(
        reward=fmean(step.reward for step in last),
        solved=fmean(step.solved for step in last),
        kl=fmean(step.kl for step in history),
        largest_kl=max(step.kl for step in history),
        ratios_off=sum(step.ratios_off for step in history) / sum(step.tokens for step in history),
        clip_fraction=fmean(step.clip_fraction for step in history),
        rollout_ms=1000 * median(rollouts),
        update_ms=1000 * median(updates),
        rollout_seconds=sum(rollouts),
        update_seconds=sum(updates),
        seconds=sum(step.seconds for step in warm),
        first_seconds=history[0].seconds,
    )
