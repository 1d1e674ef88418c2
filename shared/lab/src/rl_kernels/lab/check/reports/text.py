"""A report as text: one line per fact, easy to read and to ``grep``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rl_kernels.lab.check.reports import summary
from rl_kernels.lab.check.reports.against import Changes
from rl_kernels.lab.check.reports.summary import verdict
from rl_kernels.lab.check.result import Check
from rl_kernels.lab.check.suite import Report


def text(report: Report, *, verbose: bool = False, changes: Changes | None = None) -> Iterator[str]:
    """Yield failed checks with the commands that replay them, skips, and last the verdict.

    Args:
        report: the report of the run.
        verbose: also yield every check that passed.
        changes: differences from an earlier report, if it was compared with one.
    """
    groups = summary.grouped(summary.launch_summaries(report), lambda entry: (entry.operator, entry.candidate))
    for (operator, candidate), checks in summary.by_candidate(report).items():
        passed, ran = summary.held(checks), groups.get((operator, candidate), [])
        holds = passed == len(checks) and not any(entry.failed for entry in ran)
        backends = dict.fromkeys(name for entry in ran for name in entry.backends if name != candidate)
        on = f" on {', '.join(backends)}" if backends else ""
        yield f"{verdict(holds)} {operator} {candidate}{on}: {passed} of {len(checks)}"
        for entry in ran:
            yield from _launch_lines(entry)
        for check in checks:
            if verbose or not check.passed:
                yield "  " + _line(check)
            if not check.passed:
                yield f"    replay: {report.replay(check)}"
    for (operator, candidate, relation, reason), skips in summary.by_reason(report).items():
        yield f"skipped {operator} {candidate} {relation} ({len(skips)}): {_one_line(reason)}"
    if changes is not None:
        lines = [_one_line(line) for line in changes.said()]
        yield f"{verdict(not changes.regressed)} against the earlier report: {len(lines) or 'no'} changes"
        yield from (f"  {line}" for line in lines)
    if report.interrupted:
        yield f"interrupted ({report.interrupted}): these are the results until then"
    worse = changes is not None and changes.regressed
    counts = f"{summary.checks_said(report)}{', worse than the earlier report' if worse else ''}"
    yield f"{verdict(report.passed and not worse)} {summary.suite_name(report)}: {counts}"


def _launch_lines(entry: summary.LaunchSummary) -> Iterator[str]:
    if entry.failed:
        yield f"  FAIL {entry.fault}"
    yield from (f"  {line}" for line in entry.kernels_said)


def _line(check: Check) -> str:
    comparison = check.comparison
    numbers = (
        ""
        if math.isnan(comparison.max_abs)
        else (f" max_abs={comparison.max_abs:.3g} mean_abs={comparison.mean_abs:.3g} max_rel={comparison.max_rel:.3g}")
    )
    line = f"{verdict(check.passed)} {check.relation} {check.case}: {check.item} [{summary.shape_said(check)}]"
    line += f" {check.dtype}{numbers} tolerance={check.tolerance}"
    return line if check.passed else f"{line} seed={check.seed}: {_one_line(comparison.message)}"


def _one_line(message: str) -> str:
    return " ".join(summary.printable(message).split())
