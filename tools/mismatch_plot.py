"""The picture of `mismatch.py`: KL and ratio between rollout and training, and the reward, over the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from rl_kernels.demo import panels
from rl_kernels.demo.panels import BLUE, ORANGE, RED, TEAL, Line
from rl_kernels.lab.bench.plot import save

COLOURS = (BLUE, ORANGE, RED, "#7d3c98", TEAL)


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the means over the seeds, and of the reward the range too, in the format that the file's name says."""
    runs = document["runs"]
    names = list(dict.fromkeys(each["way"] for each in runs))
    steps = runs[0]["steps"]
    lines = [Line(name, colour, 2.5, steps, ()) for name, colour in zip(names, COLOURS, strict=True)]
    figure = Figure(figsize=(14, 6), layout=ConstrainedLayoutEngine(wspace=0.06))
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.3))
    kl, ratio, reward = (figure.add_subplot(each) for each in (grid[0, 0], grid[1, 0], grid[:, 1]))
    panels.zero_and_powers(kl, lines, [_over(runs, name, "kl", fmean) for name in names])
    kl.set(title="KL from rollout to training, same weights", ylabel="nats per token")
    panels.zero_and_powers(ratio, lines, [_over(runs, name, "largest", max) for name in names])
    ratio.set(title="Largest |ratio − 1|, before any update")
    _reward(reward, lines, runs)
    for axes in (kl, ratio, reward):
        panels.over_steps(axes, steps[-1])
    panels.legend(figure, lines)
    save(figure, path)


def _over(
    runs: Sequence[Mapping[str, Any]], name: str, measure: str, taken: Callable[[Sequence[float]], float]
) -> list[float]:
    """Return what is taken of all seeds of a way, for each stretch of steps."""
    return [taken(values) for values in zip(*(each[measure] for each in runs if each["way"] == name), strict=True)]


def _reward(axes: Axes, lines: Sequence[Line], runs: Sequence[Mapping[str, Any]]) -> None:
    for line in lines:
        least, mean, most = (_over(runs, line.label, "reward", taken) for taken in (min, fmean, max))
        axes.fill_between(line.steps, least, most, color=line.colour, alpha=0.12, linewidth=0)
        axes.plot(line.steps, mean, color=line.colour, linewidth=2)
    seeds = sum(each["way"] == lines[0].label for each in runs)
    axes.set(title=f"Reward: mean and range of {seeds} seeds", ylim=(-0.03, 1.03))
