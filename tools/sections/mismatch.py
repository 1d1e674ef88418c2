"""The table and picture of `mismatch.py`: KL and ratio of rollout and training, the reward, and the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sections.text import ran_on

from rl_kernels.demo import report as panels
from rl_kernels.demo.report import BLUE, GREEN, ORANGE, RED, Line
from rl_kernels.lab.bench.plot import save
from rl_kernels.lab.bench.report import as_table

COLORS = (BLUE, ORANGE, RED, "#7d3c98", GREEN)
WIDTHS = (6.0, 2.0, 2.0, 2.0, 2.0)
"""Line widths by way; the first way's lines are at 0, under the others."""


HEADINGS = (
    *("", "reward, last tenth", "evaluated in FP32", "least to greatest"),
    *("KL", "ratio off 1, largest", "clipped at once"),
)


def section(document: Mapping[str, Any]) -> str:
    """Return the table of the effects of a mismatch between rollout and training on a run."""
    settings = document["settings"]
    batch = settings["prompts"] * settings["samples_per_prompt"]
    sizes = f"{document['seeds']} seeds, {settings['steps']} steps of {batch} samples"
    return f"{sizes}:\n\n{table(document['runs'])}\n\n{ran_on(document['environment'])}"


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each way: reward at the end, evaluation, and the mismatch over the whole run."""
    rows = [HEADINGS]
    for name in dict.fromkeys(run["way"] for run in runs):
        mine = [run for run in runs if run["way"] == name]
        last = fmean(fmean(run["reward"][-max(1, len(run["reward"]) // 10) :]) for run in mine)
        evaluated = [run["evaluated"] for run in mine]
        kl, clipped = (fmean(fmean(run[measure]) for run in mine) for measure in ("kl", "clipped_at_once"))
        largest = max(max(run["largest"]) for run in mine)
        cells = (
            *(f"{last:.3f}", f"{fmean(evaluated):.3f}", f"{min(evaluated):.3f} to {max(evaluated):.3f}"),
            *(f"{kl:.1e}" if kl else "0", f"{largest:.1e}" if largest else "0"),
            f"{clipped:.3%}" if clipped else "0",
        )
        rows.append((name, *cells))
    return as_table(rows)


@rc_context(panels.STYLE)
def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the means over the seeds, and of the reward the range too, in the format that the file's name says."""
    runs = document["runs"]
    names = list(dict.fromkeys(run["way"] for run in runs))
    steps = runs[0]["steps"]
    lines = [Line(*look, steps, ()) for look in zip(names, COLORS, WIDTHS, strict=True)]
    figure = Figure(figsize=(14, 7), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.2), height_ratios=(1.3, 1))
    kl, ratio, reward, evaluated = (figure.add_subplot(grid[place]) for place in ((0, 0), (1, 0), (0, 1), (1, 1)))
    panels.zero_and_powers(kl, lines, [_over(runs, name, "kl", fmean) for name in names])
    kl.set(title="KL from rollout to training, same weights", ylabel="nats per token")
    panels.zero_and_powers(ratio, lines, [_over(runs, name, "largest", max) for name in names])
    ratio.set(title="Largest |ratio − 1|, before any update")
    _reward(reward, lines, runs)
    for axes in (kl, ratio, reward):
        axes.set(xlabel="step", xlim=(1, steps[-1]))
    _evaluated(evaluated, lines, runs)
    figure.legend(*kl.get_legend_handles_labels(), loc="outside upper left", ncols=len(lines))
    save(figure, path)


def _over(
    runs: Sequence[Mapping[str, Any]], name: str, measure: str, reduce: Callable[[Sequence[float]], float]
) -> list[float]:
    """Reduce a measure over all seeds of a way, for each stretch of steps."""
    return [reduce(values) for values in zip(*(run[measure] for run in runs if run["way"] == name), strict=True)]


def _reward(axes: Axes, lines: Sequence[Line], runs: Sequence[Mapping[str, Any]]) -> None:
    for line in lines:
        least, mean, most = (_over(runs, line.label, "reward", reduce) for reduce in (min, fmean, max))
        axes.fill_between(line.steps, least, most, color=line.color, alpha=0.12, linewidth=0)
        axes.plot(line.steps, mean, color=line.color, linewidth=2)
    seeds = sum(run["way"] == lines[0].label for run in runs)
    axes.set(title=f"Reward: mean and range of {seeds} seeds", ylim=(-0.03, 1.03))


def _evaluated(axes: Axes, lines: Sequence[Line], runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw a dot a seed, and a line at their mean."""
    for place, line in enumerate(lines):
        rewards = [run["evaluated"] for run in runs if run["way"] == line.label]
        axes.plot([place] * len(rewards), rewards, "o", color=line.color, alpha=0.6)
        axes.hlines(fmean(rewards), place - 0.3, place + 0.3, color=line.color, linewidth=2)
    axes.set_xticks(range(len(lines)), [line.label for line in lines])
    axes.set(title="Reward of the trained policies, all sampled in plain FP32")
