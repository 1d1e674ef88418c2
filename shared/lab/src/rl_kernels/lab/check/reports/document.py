"""A report as strict JSON for programs."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from datetime import datetime, timezone
from typing import Any

from rl_kernels.lab.check.reports import summary
from rl_kernels.lab.check.result import Check
from rl_kernels.lab.check.suite import Report


def as_json(document: dict[str, Any]) -> str:
    """Return a document as strict JSON."""
    return json.dumps(document, allow_nan=False, indent=2)


def document_of(report: Report) -> dict[str, Any]:
    """Return the report as plain values: a number that is not finite is None."""
    groups = summary.grouped(summary.launch_summaries(report), lambda entry: (entry.operator, entry.candidate))
    launched = defaultdict(list, groups)
    return {
        "suite_name": summary.suite_name(report),
        "passed": report.passed,
        "interrupted": report.interrupted,
        "pass_rate": report.pass_rate,
        "candidates": [
            {
                "operator": operator,
                "name": candidate,
                "passed": all(check.passed for check in checks) and not any(entry.failed for entry in launched[key]),
                "ran": [_launch_entry(entry) for entry in launched[key]],
                "outputs": [_entry(check, report) for check in checks],
            }
            for key, checks in summary.by_candidate(report).items()
            for operator, candidate in [key]
        ],
        "skipped": [vars(skip) for skip in report.skips],
        "date": datetime.now(timezone.utc).date().isoformat(),
        "environment": summary.environment(report),
        "seeds": summary.seeds(report),
        "chosen": summary.chosen(report),
        "contract_version": report.plan.setting.contract.version,
    }


def _entry(check: Check, report: Report) -> dict[str, Any]:
    comparison = check.comparison
    entry = {
        "case_id": check.case_id,
        "relation": check.relation,
        "case": check.case,
        "output": check.item,
        "shape": list(check.shape),
        "dtype": check.dtype,
        "max_abs": _finite(comparison.max_abs),
        "mean_abs": _finite(comparison.mean_abs),
        "max_rel": _finite(comparison.max_rel),
        "worst": comparison.worst,
        "tolerance": check.tolerance,
        "row": check.row and " / ".join(check.row),
        "share": _finite(comparison.share),
        "passed": check.passed,
        "message": comparison.message,
        "seed": check.seed,
        "replay": report.replay(check),
    }
    return {**entry, "traceback": comparison.traceback} if comparison.traceback else entry


def _launch_entry(entry: summary.LaunchSummary) -> dict[str, Any]:
    return {
        "dtype": entry.dtype,
        "cases": entry.cases,
        "backends": dict(entry.backends),
        "kernels": [
            {"name": name, "cases": count, "own": name in entry.own} for name, count in sorted(entry.kernels.items())
        ],
        "cases_with_own_kernels": entry.own_cases,
        "without_own_kernels": list(entry.without_own),
        "message": entry.fault,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
