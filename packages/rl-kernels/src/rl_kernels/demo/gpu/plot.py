"""The picture of both twins: reward, what differs between rollout and training, clip fraction, and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator

from rl_kernels.demo.gpu.summary import Summary
from rl_kernels.demo.gpu.train import StepMetrics
from rl_kernels.demo.panels import BLUE, ORANGE, curve, over_steps, smooth, tidy
from rl_kernels.lab.bench.plot import save

COLOURS = (BLUE, ORANGE)
"""Of ours, and of the stock twin."""
Histories = Mapping[str, Sequence[StepMetrics]]


def draw(histories: Histories, summaries: Mapping[str, Summary], parameters: int, path: Path) -> None:
    """Write the curves of both twins, ours first, in the format that the name of the file says."""
    figure = Figure(figsize=(13, 7), layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.08))
    (reward, kl, ratios), (clipped, time, clock) = figure.subplots(2, 3)
    _reward(reward, histories)
    _kl(kl, histories)
    _ratios(ratios, histories)
    _clipped(clipped, histories)
    _time(time, summaries)
    _clock(clock, histories)
    steps = max(map(len, histories.values()))
    for axes in (reward, kl, ratios, clipped):
        over_steps(axes, steps)
    for axes in (time, clock):
        tidy(axes)
    figure.suptitle(
        f"GRPO from random weights: a Llama of {parameters / 1e6:.0f} million parameters puts digits in order"
    )
    save(figure, path)


def _curves(axes: Axes, histories: Histories, name: str, scale: float = 1.0) -> None:
    for (twin, history), colour in zip(histories.items(), COLOURS, strict=True):
        values = [scale * getattr(metrics, name) for metrics in history]
        curve(axes, [metrics.step for metrics in history], values, colour, twin)


def _reward(axes: Axes, histories: Histories) -> None:
    _curves(axes, histories, "reward")
    axes.set(title="Reward", ylim=(-0.03, 1.03))
    axes.legend(loc="lower right", frameon=False)


def _kl(axes: Axes, histories: Histories) -> None:
    """Draw on a scale that is linear up to the least value but 0, so that 0 has a place beside powers of ten."""
    _curves(axes, histories, "kl")
    found = [metrics.kl for history in histories.values() for metrics in history if metrics.kl > 0]
    if found:
        axes.set_yscale("symlog", linthresh=min(found), linscale=0.4)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(-0.2 * min(found), 3 * max(found))
    axes.set(title="KL between rollout and training", ylabel="nats a token")
    _tell_zero(axes, histories, "kl")


def _ratios(axes: Axes, histories: Histories) -> None:
    for (twin, history), colour in zip(histories.items(), COLOURS, strict=True):
        shares = [100 * metrics.ratios_off / metrics.tokens for metrics in history]
        curve(axes, [metrics.step for metrics in history], shares, colour, twin)
    axes.set(title="Ratio other than 1, first training pass", ylabel="% of tokens")
    axes.set_ylim(bottom=0)
    _tell_zero(axes, histories, "ratios_off")


def _tell_zero(axes: Axes, histories: Histories, name: str) -> None:
    """Say of a twin, where there is room, that it is 0 in every step, which no line shows."""
    for (twin, history), colour in zip(histories.items(), COLOURS, strict=True):
        if not any(getattr(metrics, name) for metrics in history):
            text = f"{twin}: 0 in every step"
            axes.annotate(text, (1, 1), (-4, -12), "axes fraction", "offset points", ha="right", color=colour)


def _clipped(axes: Axes, histories: Histories) -> None:
    _curves(axes, histories, "clip_fraction", 100)
    axes.set(title="Clip fraction, last training pass", ylabel="% of tokens")
    axes.set_ylim(bottom=0)


def _time(axes: Axes, summaries: Mapping[str, Summary]) -> None:
    """Draw two bars a twin: milliseconds of rollout and of update, with their values."""
    width = 0.38
    for place, (summary, colour) in enumerate(zip(summaries.values(), COLOURS, strict=True)):
        heights = [summary.rollout_ms, summary.update_ms]
        bars = axes.bar([part + (place - 0.5) * width for part in range(2)], heights, 0.92 * width, color=colour)
        axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_xticks([0, 1], ["rollout", "update"])
    axes.set(title="Time a step, median", ylabel="ms")
    axes.margins(y=0.12)
    axes.set_axisbelow(True)


def _clock(axes: Axes, histories: Histories) -> None:
    """Draw the reward over the time since the second step began."""
    for (twin, history), colour in zip(histories.items(), COLOURS, strict=True):
        warm = history[1:] or history
        seconds = list(accumulate(metrics.seconds for metrics in warm))
        axes.plot(seconds, smooth([metrics.reward for metrics in warm]), color=colour, linewidth=2, label=twin)
    axes.set(title="Reward over time", xlabel="seconds, the first step left out", ylim=(-0.03, 1.03))
    axes.set_xlim(left=0)
