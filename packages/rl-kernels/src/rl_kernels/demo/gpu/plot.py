"""The picture of both twins: the bits, ratio and KL between rollout and training, reward, and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from rl_kernels.demo import panels
from rl_kernels.demo.gpu.summary import Summary
from rl_kernels.demo.gpu.train import StepMetrics
from rl_kernels.demo.panels import BLUE, ORANGE, RED, TEAL, Line, curve, over_steps, smooth, tidy
from rl_kernels.lab.bench.plot import save

COLOURS = (TEAL, RED)
"""Of ours, and of the stock twin, in BF16, in which both train."""
FP32_COLOURS = (BLUE, ORANGE)
WIDTHS = ((8.0, 2.5), (2.0, 2.0))
"""Of both twins in BF16 and in FP32: ours, at 0, lie on each other."""
Histories = Mapping[str, Sequence[StepMetrics]]


def draw(histories: Histories, summaries: Mapping[str, Summary], parameters: int, path: Path) -> None:
    """Write the curves of both twins, ours first, in the format that the name of the file says."""
    figure = Figure(figsize=(15, 8), layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.08))
    (bits, ratio, kl), (reward, clock, time) = figure.subplots(2, 3)
    lines = _lines(histories)
    panels.bits(bits, lines)
    panels.ratio(ratio, lines)
    panels.kl(kl, lines)
    _reward(reward, histories)
    _clock(clock, histories)
    _time(time, summaries)
    steps = max(map(len, histories.values()))
    for axes in (bits, ratio, kl, reward):
        over_steps(axes, steps)
    for axes in (time, clock):
        tidy(axes)
    panels.legend(figure, lines)
    title = f"GRPO on a Llama of {parameters / 1e6:.0f} million parameters, with random weights at first"
    figure.suptitle(title, x=0.99, ha="right", size="medium")
    save(figure, path)


def _lines(histories: Histories) -> list[Line]:
    """Return the lines of both twins in both dtypes, ours last, so that nothing covers them."""
    lines = []
    looks = zip(histories.items(), COLOURS, FP32_COLOURS, WIDTHS, strict=True)
    for (twin, history), bf16, fp32, widths in reversed(list(looks)):
        lines.append(Line(f"{twin}, BF16", bf16, widths[0], [metrics.step for metrics in history], history))
        measured = [(metrics.step, metrics.fp32) for metrics in history if metrics.fp32 is not None]
        if measured:
            lines.append(Line(f"{twin}, FP32", fp32, widths[1], *zip(*measured, strict=True)))
    return lines


def _reward(axes: Axes, histories: Histories) -> None:
    for (twin, history), colour in zip(histories.items(), COLOURS, strict=True):
        curve(axes, [metrics.step for metrics in history], [metrics.reward for metrics in history], colour, twin)
    axes.set(title="Reward", ylim=(-0.03, 1.03))
    axes.legend(loc="lower right", frameon=False)


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
