"""What the demo prints: a progress bar with a growing table of steps, then the comparison and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rl_kernels.demo.compare import Comparison
from rl_kernels.demo.numerics import OURS_BF16, PLAIN_BF16, PLAIN_FP32
from rl_kernels.demo.verdict import MARGIN, Verdict

ROWS = 10
"""Rows of the table of steps, at most; each is the mean since the row before."""
SAME_IN_BF16 = """Plain BF16 differs nowhere: this CPU's BF16 products give a row the same bits
in any batch of this size. Those of other CPUs and of GPUs do not, nor does FP32 here."""


class Column(NamedTuple):
    """A column of the table of steps: its heading, and what it says of the metrics of several steps."""

    heading: str
    cell: Callable[[Sequence[Any]], str]


def mean(name: str, form: str) -> Callable[[Sequence[Any]], str]:
    """Return a cell: the mean of a metric over the steps."""
    return lambda steps: format(sum(getattr(metrics, name) for metrics in steps) / len(steps), form)


def last_step(steps: Sequence[Any]) -> str:
    """Return a cell: the number of the last step."""
    return str(steps[-1].step)


def compared(name: str, field: str) -> Callable[[Sequence[Any]], str]:
    """Return a cell: a count of the watched numerics of that name, summed over the steps that measured it."""

    def cell(steps: Sequence[Any]) -> str:
        found = [getattr(metrics.watched[name], field) for metrics in steps if name in metrics.watched]
        return f"{sum(found):,}" if found else ""

    return cell


def _ours(steps: Sequence[Any]) -> str:
    return f"{sum(metrics.gap.mismatches for metrics in steps):,}"


COLUMNS = (
    Column("step", last_step),
    Column("reward", mean("reward", ".3f")),
    Column("solved", mean("solved", ".0%")),
    Column("tokens\ncompared", compared(PLAIN_BF16.name, "tokens")),
    Column("plain\nBF16", compared(PLAIN_BF16.name, "mismatches")),
    Column("plain\nFP32", compared(PLAIN_FP32.name, "mismatches")),
    Column("ours\nBF16", compared(OURS_BF16.name, "mismatches")),
    Column("ours\nFP32", _ours),
    Column("s/step", mean("seconds", ".2f")),
)


def caption(every: int) -> str:
    """Return the line under the table of steps, whose watched numerics were measured in every so many steps."""
    return (
        "Tokens whose log-prob differs in any bit between rollout and training: in plain PyTorch, and with rl-kernels "
        f"(ours). Ours FP32 trains and is compared in every step, the others in one of {every}."
    )


class TrainingView:
    """A ``with`` block that shows the steps as they come; call it with each step's metrics."""

    def __init__(
        self,
        console: Console,
        steps: int,
        columns: Sequence[Column] = COLUMNS,
        title: str = "GRPO",
        caption: str | None = None,
    ) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]:.2f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("training", total=steps, reward=0.0)
        self._columns = columns
        headings = (column.heading for column in columns)
        self._table = Table(*headings, title=title, caption=caption, caption_justify="left")
        for column in self._table.columns:
            column.justify = "right"
        self._live = Live(Group(self._table, self._bar), console=console, refresh_per_second=4)
        self._every = -(-steps // ROWS)
        self._steps = steps
        self._since: list[Any] = []

    def __enter__(self) -> TrainingView:
        """Start drawing."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last state on the screen."""
        self._live.stop()
        self._console.print()

    def __call__(self, metrics: Any) -> None:
        """Show one more step, counted by its ``step``, with the columns and its ``reward``."""
        self._bar.update(self._task, advance=1, reward=metrics.reward)
        self._since.append(metrics)
        if metrics.step % self._every == 0 or metrics.step == self._steps:
            self._table.add_row(*(column.cell(self._since) for column in self._columns))
            self._since = []


def show_answers(console: Console, answers: Sequence[tuple[str, str, float]]) -> None:
    """Print sampled answers: prompt, answer, reward."""
    table = Table("prompt", "answer", "reward", title="sampled after training")
    for prompt, answer, reward in answers:
        # As Text: an answer may look like markup.
        table.add_row(prompt, Text(_printable(answer)), f"{reward:.2f}")
    console.print(table)


def _printable(text: str) -> str:
    return "".join(character if " " <= character <= "~" else "·" for character in text)


def show_comparison(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print how the log-probs of rollout and training compare, a row for each arithmetic and way to decode."""
    table = Table(
        *("computed with", "rollout, one\ntoken of each", "tokens", "bits differ", "largest\n|ratio - 1|"),
        title="log-probs: cached rollout against training pass over the whole padded batch",
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for case in comparisons:
        found, colour = case.gap, "red" if case.gap.mismatches else "green"
        mismatches = f"[{colour}]{found.mismatches:,} ({found.mismatches / found.tokens:.0%})[/]"
        largest = f"{found.largest:.1e}" if found.mismatches else "0"
        table.add_row(case.numerics, case.decoding, f"{found.tokens:,}", mismatches, largest)
    console.print(table)
    differing = {case.numerics for case in comparisons if case.gap.mismatches}
    if PLAIN_FP32.name in differing and PLAIN_BF16.name not in differing:
        console.print(SAME_IN_BF16, highlight=False)


def show_verdict(
    console: Console,
    verdict: Verdict,
    files: Sequence[str],
    seconds: float,
    needed: int,
    where: str = "in all steps and at the end",
) -> None:
    """Print whether the run showed what it is for, where its files are and how long it took.

    ``needed`` is the number of steps from which the reward is judged.
    """
    rewards = f"{verdict.first_reward:.3f} in the first tenth of the steps, {verdict.last_reward:.3f} in the last"
    mismatches = f"{verdict.mismatches:,} of {verdict.compared:,}, {where}"
    if verdict.enough:
        _line(console, verdict.risen, f"reward risen by at least {MARGIN}: {rewards}")
    else:
        console.print(f"shown   reward: {rewards}; judged from {needed} steps on", highlight=False, soft_wrap=True)
    _line(console, verdict.mismatches == 0, f"log-probs through the operators that differ: {mismatches}")
    console.print(f"{', '.join(files)} written; {seconds:.0f} s", highlight=False, soft_wrap=True)


def _line(console: Console, good: bool, text: str) -> None:
    console.print(f"[green]ok[/]      {text}" if good else f"[red]FAILED[/]  {text}", highlight=False, soft_wrap=True)


NEXT = """next    your model: rl-kernels audit path/to/model
        one operator: pip install ./shared/core ./packages/linear-logp
        TRL: docs/recipes/trl.md; your own loop: docs/recipes/your-own-loop.md"""


def show_next(console: Console) -> None:
    """Print what to try after the demo."""
    console.print(NEXT, highlight=False, soft_wrap=True)
