"""The picture of a run: bits, ratio and KL between rollout and training over the steps, reward, and time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, SymmetricalLogLocator

from rl_kernels.demo.measures import Gap
from rl_kernels.demo.report import Histories, Recorded
from rl_kernels.lab.bench.plot import save

BLUE, TEAL, GREEN, ORANGE, RED = "#2a6fbb", "#45c4b0", "#3a9a5b", "#d9822b", "#c0392b"
COLOURS = (TEAL, RED)
"""Of ours, and of the run in stock PyTorch."""


class Line(NamedTuple):
    """One way to compute: its name, colour and width, the steps that measured it, and what each found.

    The width is of a line that is 0 in every step: two of them, one on the other, are both seen if one is thinner.
    """

    label: str
    colour: str
    width: float
    steps: Sequence[int]
    found: Sequence[Gap]


def draw(run: Recorded, path: Path) -> None:
    """Write the curves of all ways to compute, in the format that the name of the file says."""
    histories = run.histories
    figure = Figure(figsize=(15, 8), layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.08))
    (bits, ratio, kl), (reward, clock, time) = figure.subplots(2, 3)
    lines = sorted(_lines(histories), key=lambda line: (not line.label.startswith("stock"), line.label))
    zero_and_powers(bits, lines, [[100 * each.mismatches / each.tokens for each in line.found] for line in lines])
    bits.set(title="Tokens whose log-prob differs in any bit", ylabel="% of tokens")
    bits.set_ylim(top=200)
    _zeros(bits, lines)
    zero_and_powers(ratio, lines, [[each.largest for each in line.found] for line in lines])
    ratio.set(title="Largest |ratio − 1|, before any update")
    zero_and_powers(kl, lines, [[each.kl for each in line.found] for line in lines])
    kl.set(title="KL from rollout to training, same weights", ylabel="nats per token")
    _rewards(reward, clock, histories)
    _times(time, histories)
    for axes in (bits, ratio, kl, reward):
        over_steps(axes, max(map(len, histories.values())))
    for axes in (time, clock):
        tidy(axes)
    legend(figure, lines)
    size = f"{run.parameters / 1e6:.0f} million" if run.parameters > 1e6 else f"{run.parameters:,}"
    what = "Llama" if len(histories) > 1 else "transformer"
    title = f"GRPO on a {what} of {size} parameters, with random weights at first"
    figure.suptitle(title, x=0.99, ha="right", size="medium")
    save(figure, path)


def _lines(histories: Histories) -> Iterator[Line]:
    looks = {"stock PyTorch, BF16": (RED, 2.0), "stock PyTorch, FP32": (ORANGE, 2.0), "rl-kernels, BF16": (TEAL, 8.0)}
    for name, history in histories.items():
        watched = list(dict.fromkeys(key for metrics in history for key in metrics.watched))
        # What trains is measured in every step, in the dtype that is not watched.
        own = f"{name}, {'FP32' if f'{name}, BF16' in watched else 'BF16'}"
        for key in [*watched, own]:
            measured = [metrics for metrics in history if key == own or metrics.watched]
            gaps = [metrics if key == own else metrics.watched[key] for metrics in measured]
            yield Line(key, *looks.get(key, (BLUE, 2.5)), [metrics.step for metrics in measured], gaps)


def _zeros(axes: Axes, lines: Sequence[Line]) -> None:
    """Say of how many tokens none differed, for each such line."""
    alike = [line for line in lines if not any(each.mismatches for each in line.found)]
    for place, line in enumerate(reversed(alike)):
        tokens = sum(each.tokens for each in line.found)
        text, where = f"{line.label}: 0 of {tokens:,} tokens", (-4, 7 + 13 * place)
        coordinates = ("axes fraction", "data")
        said = axes.annotate(text, (1, 0), where, coordinates, "offset points", ha="right", color=line.colour)
        said.set(weight="bold", bbox={"color": "white", "alpha": 0.7, "pad": 1})


def _rewards(steps: Axes, clock: Axes, histories: Histories) -> None:
    for (name, history), colour in zip(histories.items(), COLOURS, strict=False):
        _curve(steps, [metrics.step for metrics in history], [metrics.reward for metrics in history], colour, name)
        warm = history[1:] or history
        seconds = list(accumulate(metrics.seconds for metrics in warm))
        clock.plot(seconds, _smooth([each.reward for each in warm]), color=colour, linewidth=2, label=name)
    steps.set(title="Reward", ylim=(-0.03, 1.03))
    steps.legend(loc="lower right", frameon=False)
    clock.set(title="Reward over time", xlabel="seconds, the first step left out", ylim=(-0.03, 1.03))
    clock.set_xlim(left=0)


def _times(axes: Axes, histories: Histories) -> None:
    """Draw two bars a run: milliseconds of rollout and of update, with their values."""
    width = 0.38
    for place, (history, colour) in enumerate(zip(histories.values(), COLOURS, strict=False)):
        warm = history[1:] or history
        heights = [
            1000 * median(getattr(step, name) for step in warm) for name in ("rollout_seconds", "update_seconds")
        ]
        bars = axes.bar([part + (place - 0.5) * width for part in range(2)], heights, 0.92 * width, color=colour)
        axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_xticks([0, 1], ["rollout", "update"])
    axes.set(title="Time a step, median", ylabel="ms")
    axes.margins(y=0.12)
    axes.set_axisbelow(True)


def zero_and_powers(axes: Axes, lines: Sequence[Line], values: Sequence[Sequence[float]]) -> None:
    """Draw on a scale that is linear from 0 to the power of ten below all other values: 0 has a place of its own."""
    for line, each in zip(lines, values, strict=True):
        if any(each):
            _curve(axes, line.steps, each, line.colour, line.label)
        else:
            axes.plot(line.steps, each, color=line.colour, linewidth=line.width, label=line.label, clip_on=False)
    found = [value for each in values for value in each if value > 0]
    if found:
        least = 10.0 ** math.floor(math.log10(min(found)))
        axes.set_yscale("symlog", linthresh=least, linscale=1)
        axes.yaxis.set_minor_locator(NullLocator())
        locator = axes.yaxis.get_major_locator()
        assert isinstance(locator, SymmetricalLogLocator)
        locator.set_params(numticks=7)
        axes.set_ylim(-0.15 * least, 3 * max(found))


def legend(figure: Figure, lines: Sequence[Line]) -> None:
    """Name the lines once for all panels that share them, above these."""
    handles = [Line2D([], [], color=line.colour, linewidth=min(line.width, 5), label=line.label) for line in lines]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(lines), frameon=False)


def over_steps(axes: Axes, last: int) -> None:
    """Let the steps lie along an axis, and little else around the curves."""
    axes.set_xlabel("step")
    axes.set_xlim(1, max(2, last))
    tidy(axes)


def tidy(axes: Axes) -> None:
    """Leave a faint grid, and no frame above and on the right."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _curve(axes: Axes, steps: Sequence[int], values: Sequence[float], colour: str, label: str) -> None:
    """Draw each step thin, and the mean of the steps around it thick."""
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
    axes.plot(steps, _smooth(values), color=colour, linewidth=2, label=label)


def _smooth(values: Sequence[float]) -> list[float]:
    reach = max(1, len(values) // 50)
    around = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in around]
