"""What the demo prints of twins: the steps of each, and both side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from rl_kernels.demo.gpu.summary import Summary, share
from rl_kernels.demo.gpu.train import StepMetrics
from rl_kernels.demo.report import Column, last_step, mean


def _small(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _share(value: float) -> str:
    return f"{value:.2%}" if value else "0"


def _fp32(steps: Sequence[StepMetrics]) -> str:
    found = [metrics.fp32 for metrics in steps if metrics.fp32 is not None]
    return _share(share("mismatches", found)) if found else ""


def _milliseconds(name: str) -> Callable[[Sequence[StepMetrics]], str]:
    return lambda steps: f"{1000 * sum(getattr(metrics, name) for metrics in steps) / len(steps):,.0f}"


COLUMNS = (
    Column("step", last_step),
    Column("reward", mean("reward", ".3f")),
    Column("solved", mean("solved", ".0%")),
    Column("differ,\nBF16", lambda steps: _share(share("mismatches", steps))),
    Column("differ,\nFP32", _fp32),
    Column("KL", lambda steps: _small(sum(metrics.kl for metrics in steps) / len(steps))),
    Column("rollout\nms", _milliseconds("rollout_seconds")),
    Column("update\nms", _milliseconds("update_seconds")),
)
STEPS_CAPTION = (
    "differ: tokens whose log-prob differs in any bit between rollout and first training pass; KL: of the two in BF16."
)
ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("log-probs that differ in any bit", "mismatches", _share),
    ("log-probs that differ in any bit, FP32", "fp32_mismatches", _share),
    ("reward, last tenth of the steps", "reward", "{:.3f}".format),
    ("solved, last tenth of the steps", "solved", "{:.0%}".format),
    ("KL, nats a token", "kl", _small),
    ("KL, nats a token, FP32", "fp32_kl", _small),
    ("tokens with a ratio other than 1", "ratios_off", "{:.2%}".format),
    ("largest distance of a ratio from 1", "largest", _small),
    ("largest distance of a ratio from 1, FP32", "fp32_largest", _small),
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
    "Log-probs, KL and ratio: first training pass against rollout, the same weights; in BF16, or on FP32 copies of the "
    "weights. Clip fraction: last pass on a batch. ms a step: the median. Kernels are compiled in the first step."
)


def side_by_side(summaries: Mapping[str, Summary]) -> Iterator[tuple[str, str, str, str]]:
    """Yield what each row that was measured says of ours, of the stock twin, and of the quotient of their times."""
    ours, stock = summaries.values()
    for label, name, form in ROWS:
        one, other = getattr(ours, name), getattr(stock, name)
        if one is None or other is None:
            continue
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
