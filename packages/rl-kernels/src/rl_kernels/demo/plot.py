"""The picture of a run: bits, ratio and KL between rollout and training over the steps, reward, and time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_kernels.demo.train import Record
from rl_kernels.lab.bench.plot import save

BLUE, TEAL, GREEN, ORANGE, RED = "#2a6fbb", "#45c4b0", "#3a9a5b", "#d9822b", "#c0392b"
LOOKS = {"stock PyTorch, BF16": (RED, 2.0), "stock PyTorch, FP32": (ORANGE, 2.0), "rl-kernels, BF16": (TEAL, 8.0)}
STYLE: Any = {
    **{"axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "axes.titlesize": "medium"},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
}


class Line(NamedTuple):
    """One way to compute, and its measurements."""

    label: str
    color: str
    width: float  # of a line that is always 0: of two such lines, the thinner one on top leaves both visible
    steps: Sequence[int]
    gaps: Sequence[Record]


@rc_context(STYLE)
def draw(document: Record, path: Path) -> None:
    """Write the curves of a run, as run.json has it, in the format that the name of the file says."""
    runs, size = document["runs"], document["model"]["parameters"]
    figure = Figure(figsize=(15, 8), layout="constrained")
    (bits, ratio, kl), (reward, clock, time) = figure.subplots(2, 3)
    lines = sorted(_lines(runs), key=lambda line: (not line.label.startswith("stock"), line.label))
    zero_and_powers(bits, lines, [[100 * gap["mismatches"] / gap["tokens"] for gap in line.gaps] for line in lines])
    bits.set(title="Tokens whose log-prob differs in any bit", ylabel="% of tokens")
    zero_and_powers(ratio, lines, [[gap["largest"] for gap in line.gaps] for line in lines])
    ratio.set(title="Largest |ratio − 1|, before any update")
    zero_and_powers(kl, lines, [[gap["kl"] for gap in line.gaps] for line in lines])
    kl.set(title="KL from rollout to training, same weights", ylabel="nats per token")
    for (name, steps), color, place in zip(runs.items(), (TEAL, RED), (0, 0.4), strict=False):
        warm = steps[1:] or steps
        curve(reward, [step["step"] for step in steps], [step["reward"] for step in steps], color, name)
        seconds = list(accumulate(step["seconds"] for step in warm))
        curve(clock, seconds, [step["reward"] for step in warm], color, name)
        heights = [1000 * median(step[f"{part}_seconds"] for step in warm) for part in ("rollout", "update")]
        time.bar_label(time.bar([place, 1 + place], heights, 0.38, color=color), fmt="%.0f", padding=2)
    reward.set(title="Reward", ylim=(-0.03, 1.03))
    reward.legend(loc="lower right")
    clock.set(title="Reward over time", xlabel="seconds, the first step left out", ylim=(-0.03, 1.03), xlim=(0, None))
    time.set(title="Time a step, median", ylabel="ms", ymargin=0.12)
    time.set_xticks((0.2, 1.2), ("rollout", "update"))
    for axes in (bits, ratio, kl, reward):
        axes.set(xlabel="step", xlim=(1, max(2, *map(len, runs.values()))))
    figure.legend(*bits.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    model = f"{'Llama' if len(runs) > 1 else 'transformer'} of {size:,} parameters"
    figure.suptitle(f"GRPO on a {model}, with random weights at first", x=0.99, ha="right", size="medium")
    save(figure, path)


def _lines(runs: Mapping[str, Sequence[Record]]) -> Iterator[Line]:
    for name, steps in runs.items():
        watched = dict.fromkeys(key for step in steps for key in step["watched"])
        # The numerics that train are measured in every step, in the dtype that is not watched.
        own = f"{name}, {'FP32' if f'{name}, BF16' in watched else 'BF16'}"
        for key in (*watched, own):
            measured = [step for step in steps if key in {own, *step["watched"]}]
            gaps = [step if key == own else step["watched"][key] for step in measured]
            differ, tokens = (sum(gap[count] for gap in gaps) for count in ("mismatches", "tokens"))
            label = f"{key}: {differ:,} of {tokens:,} tokens differ"
            yield Line(label, *LOOKS.get(key, (BLUE, 2.5)), [step["step"] for step in measured], gaps)


def zero_and_powers(axes: Axes, lines: Sequence[Line], values: Sequence[Sequence[float]]) -> None:
    """Draw on a scale that is linear from 0 to the power of ten below all other values: 0 has a place of its own."""
    for line, heights in zip(lines, values, strict=True):
        if any(heights):
            curve(axes, line.steps, heights, line.color, line.label)
        else:
            axes.plot(line.steps, heights, color=line.color, linewidth=line.width, label=line.label, clip_on=False)
    positive = [height for heights in values for height in heights if height > 0]
    if positive:
        least = 10.0 ** math.floor(math.log10(min(positive)))
        axes.set_yscale("symlog", linthresh=least)
        axes.minorticks_off()
        axes.locator_params(axis="y", numticks=7)
        axes.set_ylim(-0.15 * least, 3 * max(positive))


def curve(axes: Axes, steps: Sequence[float], values: Sequence[float], color: str, label: str) -> None:
    """Draw each step thin, and the mean of the steps around it thick."""
    reach = max(1, len(values) // 50)
    smooth = [fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
    axes.plot(steps, smooth, color=color, linewidth=2, label=label)
