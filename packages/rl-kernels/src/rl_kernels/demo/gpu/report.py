"""What the demo prints of twins: the steps of each, and both side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from rl_kernels.demo.gpu.summary import Summary
from rl_kernels.demo.gpu.train import StepMetrics
from rl_kernels.demo.report import Column, last_step, mean


def _kl(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _share(steps: Sequence[StepMetrics]) -> str:
    return f"{sum(metrics.ratios_off for metrics in steps) / sum(metrics.tokens for metrics in steps):.1%}"


def _milliseconds(name: str) -> Callable[[Sequence[StepMetrics]], str]:
    return lambda steps: f"{1000 * sum(getattr(metrics, name) for metrics in steps) / len(steps):,.0f}"


COLUMNS = (
    Column("step", last_step),
    Column("reward", mean("reward", ".3f")),
    Column("solved", mean("solved", ".0%")),
    Column("KL", lambda steps: _kl(sum(metrics.kl for metrics in steps) / len(steps))),
    Column("ratio ≠ 1", _share),
    Column("clipped", mean("clip_fraction", ".1%")),
    Column("rollout ms", _milliseconds("rollout_seconds")),
    Column("update ms", _milliseconds("update_seconds")),
)
ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward, last tenth of the steps", "reward", "{:.3f}".format),
    ("solved, last tenth of the steps", "solved", "{:.0%}".format),
    ("KL, nats a token", "kl", _kl),
    ("tokens with a ratio other than 1", "ratios_off", "{:.2%}".format),
    ("clip fraction", "clip_fraction", "{:.2%}".format),
    ("rollout, ms a step", "rollout_ms", "{:,.0f}".format),
    ("update, ms a step", "update_ms", "{:,.0f}".format),
    ("rollout, s", "rollout_seconds", "{:.1f}".format),
    ("update, s", "update_seconds", "{:.1f}".format),
    ("all steps but the first, s", "seconds", "{:.1f}".format),
    ("the first, s", "first_seconds", "{:.1f}".format),
)
QUOTIENT = "ours / stock"
CAPTION = (
    "KL and ratio: of the first training pass from the rollout, whose weights are the same. Clip fraction: of the last "
    "pass on a batch. ms a step: the median. Kernels are compiled in the first step."
)


def side_by_side(summaries: Mapping[str, Summary]) -> Iterator[tuple[str, str, str, str]]:
    """Yield what each row says of ours, of the stock twin, and of the quotient of their times."""
    ours, stock = summaries.values()
    for label, name, form in ROWS:
        one, other = getattr(ours, name), getattr(stock, name)
        is_time = name.endswith(("_ms", "seconds"))
        yield label, form(one), form(other), f"{one / other:.2f}" if is_time and other else ""


def show_twins(console: Console, summaries: Mapping[str, Summary]) -> None:
    """Print the summaries side by side, ours first."""
    table = Table("", *summaries, QUOTIENT, title="the same run twice", caption=CAPTION, caption_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in side_by_side(summaries):
        table.add_row(*row)
    console.print(table)
