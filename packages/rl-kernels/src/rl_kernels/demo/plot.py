"""The picture of a run: the bits, ratio and KL between rollout and training, and the reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from rl_kernels.demo import panels
from rl_kernels.demo.numerics import OURS_BF16, OURS_FP32, PLAIN_BF16, PLAIN_FP32
from rl_kernels.demo.panels import BLUE, GREEN, ORANGE, RED, TEAL, Line
from rl_kernels.demo.train import StepMetrics


def draw(history: Sequence[StepMetrics], path: Path) -> None:
    """Write the curves of a run as a PNG."""
    figure = Figure(figsize=(15, 5), layout=ConstrainedLayoutEngine(wspace=0.06))
    grid = figure.add_gridspec(2, 3)
    bits, reward = (figure.add_subplot(grid[:, column]) for column in (0, 2))
    ratio, kl = (figure.add_subplot(grid[row, 1]) for row in (0, 1))
    lines = _lines(history)
    panels.bits(bits, lines)
    panels.ratio(ratio, lines)
    panels.kl(kl, lines)
    _reward(reward, history)
    for axes in (bits, ratio, kl, reward):
        panels.over_steps(axes, history[-1].step)
    panels.legend(figure, lines)
    figure.savefig(path, dpi=150)


def _lines(history: Sequence[StepMetrics]) -> list[Line]:
    """Return the lines of the numerics that were measured, ours last, so that nothing covers them."""
    looks = {PLAIN_BF16.name: (RED, 2.0), PLAIN_FP32.name: (ORANGE, 2.0), OURS_BF16.name: (TEAL, 8.0)}
    measured = [metrics for metrics in history if metrics.watched]
    steps = [metrics.step for metrics in measured]
    lines = [Line(name, *look, steps, [metrics.watched[name] for metrics in measured]) for name, look in looks.items()]
    own = Line(OURS_FP32.name, BLUE, 2.5, [metrics.step for metrics in history], [each.gap for each in history])
    return [*lines, own]


def _reward(axes: Axes, history: Sequence[StepMetrics]) -> None:
    steps = [metrics.step for metrics in history]
    panels.curve(axes, steps, [metrics.reward for metrics in history], BLUE, "mean reward")
    panels.curve(axes, steps, [metrics.solved for metrics in history], GREEN, "share solved")
    axes.set(title="Reward", ylim=(-0.03, 1.03))
    axes.legend(loc="upper left", frameon=False)
