"""What a run comes to: the table of its steps, its record, and what is printed at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rl_kernels.core.command import table, write_json
from rl_kernels.demo.measures import MARGIN, Gap, Verdict
from rl_kernels.demo.train import StepMetrics, Trainer
from rl_kernels.demo.ways import Numerics

ROWS = 10
"""Rows of the table of steps, at most; each is the mean since the row before."""
CAPTION = """Tokens whose log-prob differs in any bit between rollout and training, with rl-kernels
(ours) and in stock PyTorch, and their KL. The last kind trains and is compared in every step,
the others in one of"""
SAME_IN_BF16 = """Stock BF16 differs nowhere: this CPU's BF16 products give a row the same bits
in any batch of this size. Those of other CPUs and of GPUs do not, nor does FP32 here."""
NEXT = """next    your model: rl-kernels audit path/to/model
        one operator: pip install ./shared/core ./packages/linear-logp
        TRL: docs/recipes/trl.md; your own loop: docs/recipes/your-own-loop.md"""
QUOTIENT = "ours / stock"
Histories = Mapping[str, Sequence[StepMetrics]]
"""The steps of each run, by the name of its way; ours first."""


class Recorded(NamedTuple):
    """A run that was recorded."""

    histories: Histories
    parameters: int
    environment: Mapping[str, str]


def read(path: Path) -> Recorded:
    """Return what ``write`` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    histories = {name: [_step(step) for step in steps] for name, steps in found["runs"].items()}
    return Recorded(histories, found["model"]["parameters"], found["environment"])


def _step(found: dict[str, Any]) -> StepMetrics:
    return StepMetrics(**{**found, "watched": {name: Gap(**each) for name, each in found["watched"].items()}})


def write(path: Path, run: Recorded, **more: Any) -> None:
    """Write a run, and more parts of its record, as strict JSON."""
    runs = {name: [asdict(metrics) for metrics in history] for name, history in run.histories.items()}
    document = {"model": {"parameters": run.parameters}, "environment": run.environment, **more, "runs": runs}
    write_json(path, document)


def train(trainer: Trainer, console: Console) -> list[StepMetrics]:
    """Take all steps of a trainer behind a progress bar, and print a table of them."""
    steps, shown, history, since = trainer.settings.steps, (*trainer.watched, trainer.own), list[StepMetrics](), 0
    bars = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("reward {task.fields[reward]:.2f}")
    with Progress(*bars, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=steps, reward=0.0)
        numerics = "".join(f"{each.way.short} {each.dtype}".rjust(11) for each in shown)
        line(console, f"step  reward  solved{numerics}       KL  ms: rollout  update")
        for step in range(1, steps + 1):
            history.append(trainer.step(step))
            progress.update(task, advance=1, reward=history[-1].reward)
            if step % -(-steps // ROWS) == 0 or step == steps:
                line(console, _row(history[since:], shown))
                since = step
    line(console, f"{CAPTION} {trainer.settings.measure_every}.\n")
    return history


def _row(steps: Sequence[StepMetrics], shown: Sequence[Numerics]) -> str:
    names = "reward", "solved", "kl", "rollout_seconds", "update_seconds"
    reward, solved, kl, rollout, update = (fmean(getattr(step, name) for step in steps) for name in names)
    gaps = [[step.watched[each.name] for step in steps if step.watched] for each in shown[:-1]]
    cells = "".join((share(found) if found else "").rjust(11) for found in [*gaps, steps])
    return (
        f"{steps[-1].step:4}{reward:8.3f}{solved:8.0%}{cells}{small(kl):>9}{1000 * rollout:13,.0f}{1000 * update:8,.0f}"
    )


def small(value: float) -> str:
    """Return a number as a power of ten, and 0 as such."""
    return f"{value:.1e}" if value else "0"


def share(gaps: Sequence[Gap]) -> str:
    """Return the share of the tokens that differ in any bit."""
    value = sum(gap.mismatches for gap in gaps) / sum(gap.tokens for gap in gaps)
    return f"{value:.2%}" if value else "0"


class Comparison(NamedTuple):
    """How one way to decode differs from the training pass: numerics, sequences in each forward pass, and the gap."""

    numerics: Numerics
    sequences: int
    gap: Gap


def show_comparison(console: Console, cases: Sequence[Comparison]) -> None:
    """Print how the log-probs of decoding and training compare, a row for each numerics and way to decode."""
    header = "decoded, and by one training pass", "at once", "tokens", "bits differ", "|ratio - 1|"
    found = [(each.name, str(size), f"{gap.tokens:,}", share([gap]), small(gap.largest)) for each, size, gap in cases]
    line(console, f"{table(header, found)}\n")
    if {each.numerics.dtype for each in cases if each.gap.mismatches} == {"FP32"}:
        line(console, SAME_IN_BF16)


def side_by_side(histories: Histories) -> Iterator[tuple[str, ...]]:
    """Yield what each row that was measured says of both runs, and of the quotient of their times."""
    for (label, one, ours), (_, other, stock) in zip(*map(_summary, histories.values()), strict=True):
        yield label, one, other, f"{ours / stock:.2f}" if stock else ""


def _summary(history: Sequence[StepMetrics]) -> Iterator[tuple[str, str, float]]:
    """Yield label, text, and the value of a time. Kernels are compiled in the first step, which times leave out."""
    last, warm = history[-max(1, len(history) // 10) :], history[1:] or history
    fp32 = [gap for step in history for gap in step.watched.values()]
    both: Mapping[str, Sequence[Gap]] = {"": history, ", FP32": fp32} if fp32 else {"": history}
    yield from ((f"log-probs that differ in any bit{dtype}", share(gaps), 0) for dtype, gaps in both.items())
    yield "reward, last tenth of the steps", f"{fmean(step.reward for step in last):.3f}", 0
    yield "solved, last tenth of the steps", f"{fmean(step.solved for step in last):.0%}", 0
    for dtype, gaps in both.items():
        yield f"KL, nats a token{dtype}", small(fmean(gap.kl for gap in gaps)), 0
    off = sum(step.ratios_off or 0 for step in history) / sum(step.tokens for step in history)
    yield "tokens with a ratio other than 1", f"{off:.2%}", 0
    for dtype, gaps in both.items():
        yield f"largest distance of a ratio from 1{dtype}", small(max(gap.largest for gap in gaps)), 0
    yield "clip fraction", f"{fmean(step.clip_fraction for step in history):.2%}", 0
    parts = {part: [getattr(step, f"{part}_seconds") for step in warm] for part in ("rollout", "update")}
    for part, seconds in parts.items():
        yield f"{part}, ms a step", f"{1000 * median(seconds):,.0f}", median(seconds)
    totals = {f"{part}, s": sum(seconds) for part, seconds in parts.items()}
    totals |= {"all steps but the first, s": sum(step.seconds for step in warm), "the first, s": history[0].seconds}
    yield from ((label, f"{seconds:.1f}", seconds) for label, seconds in totals.items())


def show_verdict(console: Console, verdict: Verdict, needed: int) -> None:
    """Print whether the run showed what it is for; the reward is judged from ``needed`` steps on."""
    rewards = f"{verdict.first_reward:.3f} in the first tenth of the steps, {verdict.last_reward:.3f} in the last"
    good, bad = "ok      ", "FAILED  "
    if verdict.enough:
        line(console, f"{good if verdict.risen else bad}reward risen by at least {MARGIN}: {rewards}")
    else:
        line(console, f"shown   reward: {rewards}; judged from {needed} steps on")
    counts = f"{verdict.mismatches:,} of {verdict.compared:,}, in FP32 and BF16"
    line(console, f"{bad if verdict.mismatches else good}log-probs through the operators that differ: {counts}")


def line(console: Console, text: str) -> None:
    """Print text as it is, whatever characters are in it."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)
