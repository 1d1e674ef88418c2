"""The picture of a run: reward, KL and clip fraction over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from rl_kernels.demo.train import StepMetrics

BLUE, GREEN, ORANGE, RED = "#2a6fbb", "#3a9a5b", "#d9822b", "#c0392b"


def draw(history: Sequence[StepMetrics], path: Path) -> None:
    """Write the curves of a run as a PNG."""
    figure = Figure(figsize=(12, 3.8), layout=ConstrainedLayoutEngine(wspace=0.06))
    reward, kl, clipped = figure.subplots(1, 3)
    steps = [metrics.step for metrics in history]

    curve(reward, steps, [metrics.reward for metrics in history], BLUE, "mean reward")
    curve(reward, steps, [metrics.solved for metrics in history], GREEN, "share solved")
    reward.set(title="Reward", ylim=(-0.03, 1.03))
    reward.legend(loc="upper left", frameon=False)
    curve(kl, steps, [metrics.kl for metrics in history], ORANGE, "KL")
    kl.set(title="KL to the initial policy", ylabel="nats per token")
    kl.set_ylim(bottom=0)
    curve(clipped, steps, [100 * metrics.clip_fraction for metrics in history], RED, "clipped")
    clipped.set(title="Clip fraction", ylabel="% of tokens")
    clipped.set_ylim(bottom=0)

    for axes in (reward, kl, clipped):
        over_steps(axes, steps[-1])
    figure.suptitle("GRPO through the operators: the digits of a number in ascending order")
    figure.savefig(path, dpi=150)


def over_steps(axes: Axes, last: int) -> None:
    """Let the steps lie along an axis, and little else around the curves."""
    axes.set_xlabel("step")
    axes.set_xlim(1, max(2, last))
    tidy(axes)


def tidy(axes: Axes) -> None:
    """Leave a faint grid, and no frame above and on the right."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def curve(axes: Axes, steps: Sequence[int], values: Sequence[float], colour: str, label: str) -> None:
    """Draw each step thin, and the mean of the steps around it thick."""
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
    axes.plot(steps, smooth(values), color=colour, linewidth=2, label=label)


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of the values around each."""
    reach = max(1, len(values) // 50)
    around = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in around]
