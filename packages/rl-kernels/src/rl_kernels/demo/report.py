"""The output of a run: the table of its steps, two runs side by side, the verdict, and the picture."""

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
from rich.progress import track

from rl_kernels.core.command import table
from rl_kernels.demo.train import Record, Trainer
from rl_kernels.demo.ways import Ours
from rl_kernels.lab.bench.plot import save

ROWS, SHOWN = 10, 8  # most rows of the table of steps, each a mean since the row before, and most answers
CAPTION = """Tokens whose log-prob differs in any bit between rollout and training, with rl-kernels
(ours) and in stock PyTorch, and their KL. The last kind trains and is compared in every step,
the others in one of"""
NEXT = """next    your model: rl-kernels audit path/to/model --rollout
        one operator: pip install ./shared/core ./packages/linear-logp
        TRL: docs/recipes/trl.md; your own loop: docs/recipes/your-own-loop.md"""
QUOTIENT = "ours / stock"
MARGIN = 0.5  # by which the mean reward, which lies between 0 and 1, must have risen
BLUE, TEAL, GREEN, ORANGE, RED = "#2a6fbb", "#45c4b0", "#3a9a5b", "#d9822b", "#c0392b"
LOOKS = {"stock PyTorch, BF16": (RED, 2.0), "stock PyTorch, FP32": (ORANGE, 2.0), "rl-kernels, BF16": (TEAL, 8.0)}
STYLE: Any = dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
STYLE |= {"axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "axes.titlesize": "medium"}


def judged(ours: Sequence[Record], cases: Sequence[Record], needed: int) -> tuple[Record, str]:
    """Return the verdict on a run, and its text: no bit differs, and the reward has risen in the ``needed`` steps."""
    gaps = [*ours, *(case["gap"] for case in cases if case["numerics"].startswith(Ours.way))]
    gaps += [gap for step in ours for name, gap in step["watched"].items() if name.startswith(Ours.way)]
    compared, mismatches = (sum(gap[count] for gap in gaps) for count in ("tokens", "mismatches"))
    tenth, enough, mark = max(1, len(ours) // 10), len(ours) >= needed, {True: "ok    ", False: "FAILED"}
    first, last = mean("reward", ours[:tenth]), mean("reward", ours[-tenth:])
    rewards, risen = f"{first:.3f} in the first tenth of the steps, {last:.3f} in the last", last >= first + MARGIN
    shown = f"shown   reward: {rewards}; judged from {needed} steps on\n"
    text = f"{mark[risen]}  reward risen by at least {MARGIN}: {rewards}\n" if enough else shown
    text += f"{mark[mismatches == 0]}  log-probs through the operators that differ: "
    text += f"{mismatches:,} of {compared:,}, in FP32 and BF16"
    record = {"first_reward": first, "last_reward": last, "compared": compared, "mismatches": mismatches}
    return {**record, "enough": enough, "passed": mismatches == 0 and (risen or not enough)}, text


def train(trainer: Trainer) -> list[Record]:
    """Take all steps of a trainer; print a table of them, a progress bar below it, and some answers."""
    history, every = list[Record](), -(-trainer.settings.steps // ROWS)
    numerics = "".join(f"{way.short} {way.dtype}".rjust(11) for way in (*trainer.watched, trainer.own))
    print(f"step  reward  solved{numerics}       KL  ms: rollout  update")
    for step in track(range(1, trainer.settings.steps + 1), "training"):
        history.append(trainer.step(step))
        if step % every and step < trainer.settings.steps:
            continue
        latest = history[(step - 1) // every * every :]
        gaps = [[record["watched"][way.name] for record in latest if record["watched"]] for way in trainer.watched]
        shares = "".join((share(records) if records else "").rjust(11) for records in (*gaps, latest))
        rates = f"{mean('reward', latest):8.3f}{mean('solved', latest):8.0%}{shares}{small(mean('kl', latest)):>9}"
        times = f"{1000 * mean('rollout_seconds', latest):13,.0f}{1000 * mean('update_seconds', latest):8,.0f}"
        print(f"{step:4}{rates}{times}")
    answers = [(*pair, f"{reward:.2f}") for *pair, reward in trainer.answers[:: -(-len(trainer.answers) // SHOWN)]]
    print(f"{CAPTION} {trainer.settings.measure_every}.\n\n{table(('prompt', 'answer', 'reward'), answers)}\n")
    return history


def mean(name: str, records: Sequence[Record]) -> float:
    """Return the mean of the records' values by this name."""
    return fmean(record[name] for record in records)


def small(value: float) -> str:
    """Return a number as a power of ten, and 0 as such."""
    return f"{value:.1e}" if value else "0"


def share(gaps: Sequence[Record]) -> str:
    """Return the share of the tokens that differ in any bit."""
    value = sum(gap["mismatches"] for gap in gaps) / sum(gap["tokens"] for gap in gaps)
    return f"{value:.2%}" if value else "0"


def comparison(cases: Sequence[Record]) -> str:
    """Return a table of how the log-probs of decoding and training compare, in all numerics."""
    header = "decoded, and by one training pass", "at once", "tokens", "bits differ", "|ratio - 1|"
    rows = [(case["numerics"], str(case["sequences"]), case["gap"]) for case in cases]
    return table(header, [(*cells, f"{gap['tokens']:,}", share([gap]), small(gap["largest"])) for *cells, gap in rows])


def side_by_side(runs: Mapping[str, Sequence[Record]]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: label, text of each run, and the quotient of their times."""
    for (label, our_text, ours), (_, stock_text, stock) in zip(*map(_summary, runs.values()), strict=True):
        yield label, our_text, stock_text, f"{ours / stock:.2f}" if stock else ""


def _summary(steps: Sequence[Record]) -> Iterator[tuple[str, str, float]]:
    """Yield label, text, and the value of a time, or 0. Times skip the first step, in which kernels are compiled."""
    last, warm = steps[-max(1, len(steps) // 10) :], steps[1:] or steps
    for kind, gaps in {"": steps, ", FP32": [gap for step in steps for gap in step["watched"].values()]}.items():
        if gaps:
            yield f"log-probs that differ in any bit{kind}", share(gaps), 0
            yield f"KL, nats a token{kind}", small(mean("kl", gaps)), 0
            yield f"largest distance of a ratio from 1{kind}", small(max(gap["largest"] for gap in gaps)), 0
    yield "tokens with a ratio other than 1", f"{mean('ratios_off', steps) / mean('tokens', steps):.2%}", 0
    yield "clip fraction", f"{mean('clip_fraction', steps):.2%}", 0
    yield "reward, last tenth of the steps", f"{mean('reward', last):.3f}", 0
    yield "solved, last tenth of the steps", f"{mean('solved', last):.0%}", 0
    for part in ("rollout", "update"):
        seconds = [step[f"{part}_seconds"] for step in warm]
        yield f"{part}, ms a step", f"{1000 * median(seconds):,.0f}", median(seconds)
        yield f"{part}, s", f"{sum(seconds):.1f}", sum(seconds)
    for label, part_of_steps in (("all steps but the first, s", warm), ("the first, s", steps[:1])):
        total = sum(step["seconds"] for step in part_of_steps)
        yield label, f"{total:.1f}", total


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
    if positive := [height for heights in values for height in heights if height > 0]:
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
