"""A report as one HTML page: a heat map whose squares link to their cases. No script, no network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rl_kernels.lab.check.reports import summary
from rl_kernels.lab.check.result import Check, Record, Skip
from rl_kernels.lab.check.suite import Report

LONGEST = 1200
"""Characters of a message that the page shows; the JSON has all of them."""
LEVELS = (("all", 1.0), ("most", 0.9), ("some", 0.5), ("few", 0.0))
"""Color of a square -> least share of its checks that pass; at least one must pass."""


def write_html(report: Report, path: Path | str) -> None:
    """Write the page, which needs no other file.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(_page(report), encoding="utf-8")


def _page(report: Report) -> str:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: summary.printable(value) if type(value) is str else value,
    )
    templates.filters |= {"number": _number, "clipped": _clipped, "shape": summary.shape_said, "place": summary.place}
    shown = {"report": report, "summary": summary, "page": Page(report), "contract": report.plan.setting.contract}
    return templates.get_template("report.html.jinja").render(shown)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"


def _clipped(text: str) -> str:
    left_out = len(text) - LONGEST
    return text if left_out <= 0 else f"{text[:LONGEST]} ... ({left_out} more characters)"


@dataclass(frozen=True)
class Square:
    """The records of one candidate, relation and dtype."""

    anchor: str
    operator: str
    candidate: str
    dtype: str
    relation: str
    records: Sequence[Record]

    @cached_property
    def checks(self) -> list[Check]:
        """The checks that ran."""
        return [record for record in self.records if isinstance(record, Check)]

    @cached_property
    def skips(self) -> list[Skip]:
        """The checks that did not run."""
        return [record for record in self.records if isinstance(record, Skip)]

    @property
    def held(self) -> int:
        """Number of checks that passed."""
        return summary.held(self.checks)

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return self.held < len(self.checks)

    @property
    def level(self) -> str:
        """The color, by the share of the checks that passed."""
        if not self.checks:
            return "skip"
        share = self.held / len(self.checks)
        return next((name for name, least in LEVELS if share >= least and share > 0), "none")

    @property
    def hint(self) -> str:
        """Text that is shown on hover."""
        parts = [f"{self.held} of {len(self.checks)} passed"] if self.checks else []
        return "; ".join(parts + [f"{count} skipped: {reason}" for reason, count in self.reasons.items()])

    @property
    def reasons(self) -> dict[str, int]:
        """Reason for skipping -> number of checks."""
        return {reason: len(skips) for reason, skips in summary.grouped(self.skips, lambda skip: skip.reason).items()}

    @property
    def cases(self) -> dict[str, list[Check]]:
        """The checks by case; failed checks and cases with one come first."""
        return summary.grouped(sorted(self.checks, key=lambda check: check.passed), lambda check: check.case)


class Page:
    """The records in the layout of the page."""

    def __init__(self, report: Report) -> None:
        groups = summary.grouped(
            report.records, lambda record: (record.operator, record.candidate, record.dtype, record.relation)
        )
        self._squares = {key: Square(f"s{n}", *key, records) for n, (key, records) in enumerate(groups.items())}
        known = list(dict.fromkeys(record.relation for record in report.records if record.relation != "all"))
        self.relations = sorted(known, key=[*report.plan.relations, *known].index)
        """The columns of each dtype."""
        self.dtypes = list(dict.fromkeys([*report.plan.dtypes, *(record.dtype for record in report.records)]))
        """The groups of columns."""
        self.tracebacks = summary.grouped(
            [check for check in report.checks if check.comparison.traceback], lambda check: check.comparison.traceback
        )
        """Traceback -> checks that ended in it; many checks can end in the same one."""
        self._numbers = {traceback: number for number, traceback in enumerate(self.tracebacks, 1)}

    @property
    def rows(self) -> dict[str, list[str]]:
        """The candidates by operator; candidates that could not run come last."""
        ran_first = sorted(self._squares.values(), key=lambda square: not square.checks)
        pairs = dict.fromkeys((square.operator, square.candidate) for square in ran_first)
        return {
            operator: [name for _, name in group]
            for operator, group in summary.grouped(pairs, lambda pair: pair[0]).items()
        }

    @property
    def details(self) -> Iterator[Square]:
        """Yield the squares with checks, failed ones first."""
        squares = [square for square in self._squares.values() if square.checks]
        yield from sorted(squares, key=lambda square: not square.failed)

    def square(self, operator: str, candidate: str, dtype: str, relation: str) -> Square | None:
        """Return a square of the map; a candidate that could not run has one square, ``all``."""
        return self._squares.get((operator, candidate, dtype, relation))

    def traceback(self, check: Check) -> int:
        """Return the number of a check's traceback."""
        return self._numbers[check.comparison.traceback]
