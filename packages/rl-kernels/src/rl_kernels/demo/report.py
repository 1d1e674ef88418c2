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
from rl_kernels.demo.verdict import MARGIN, Verdict

ROWS = 10
"""Rows of the table of steps, at most; each is the mean since the row before."""


class Column(NamedTuple):
    """A column of the table of steps: its heading, and what it says of the metrics of several steps."""

    heading: str
    cell: Callable[[Sequence[Any]], str]


def mean(name: str, form: str) -> Callable[[Sequence[Any]], str]:
    """Return a cell: the mean of a metric over the steps."""
    return lambda steps: format(sum(getattr(metrics, name) for metrics in steps) / len(steps), form)


def total(name: str) -> Callable[[Sequence[Any]], str]:
    """Return a cell: the sum of a metric over the steps."""
    return lambda steps: f"{sum(getattr(metrics, name) for metrics in steps):,}"


def last_step(steps: Sequence[Any]) -> str:
    """Return a cell: the number of the last step."""
    return str(steps[-1].step)


COLUMNS = (
    Column("step", last_step),
    Column("reward", mean("reward", ".3f")),
    Column("solved", mean("solved", ".0%")),
    Column("KL", mean("kl", ".2f")),
    Column("clipped", mean("clip_fraction", ".1%")),
    Column("tokens", total("tokens")),
    Column("bits differ", total("mismatches")),
    Column("s/step", mean("seconds", ".2f")),
)


class TrainingView:
    """A ``with`` block that shows the steps as they come; call it with each step's metrics."""

    def __init__(self, console: Console, steps: int, columns: Sequence[Column] = COLUMNS, title: str = "GRPO") -> None:
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
        self._table = Table(*(column.heading for column in columns), title=title)
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
        *("computed with", "rollout: one token each of", "tokens", "bits differ", "largest difference"),
        title="log-probs: cached rollout against training pass over the whole padded batch",
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for case in comparisons:
        colour = "red" if case.mismatches else "green"
        mismatches = f"[{colour}]{case.mismatches:,} ({case.mismatches / case.tokens:.0%})[/]"
        table.add_row(
            case.arithmetic,
            case.decoding,
            f"{case.tokens:,}",
            mismatches,
            f"{case.largest:.1e}" if case.mismatches else "0",
        )
    console.print(table)


def show_verdict(
    console: Console,
    verdict: Verdict,
    files: Sequence[str],
    seconds: float,
    where: str = "in all steps and at the end",
) -> None:
    """Print whether the run showed what it is for, where its files are and how long it took."""
    rewards = f"{verdict.first_reward:.3f} in the first tenth of the steps, {verdict.last_reward:.3f} in the last"
    mismatches = f"{verdict.mismatches:,} of {verdict.compared:,}, {where}"
    _line(console, verdict.risen, f"reward risen by at least {MARGIN}: {rewards}")
    _line(console, verdict.mismatches == 0, f"log-probs through the operators that differ: {mismatches}")
    console.print(f"{', '.join(files)} written; {seconds:.0f} s", highlight=False, soft_wrap=True)


def _line(console: Console, good: bool, text: str) -> None:
    console.print(f"[green]ok[/]      {text}" if good else f"[red]FAILED[/]  {text}", highlight=False, soft_wrap=True)
