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
    groups = summary.grouped(summary.seen(report), lambda each: (each.operator, each.candidate))
    seen = defaultdict(list, groups)
    return {
        "suite_name": summary.suite_name(report),
        "passed": report.passed,
        "interrupted": report.interrupted,
        "pass_rate": report.pass_rate,
        "candidates": [
            {
                "operator": operator,
                "name": candidate,
                "passed": all(check.passed for check in checks) and not any(each.failed for each in seen[where]),
                "ran": [_ran(each) for each in seen[where]],
                "outputs": [_entry(check, report) for check in checks],
            }
            for where, checks in summary.by_candidate(report).items()
            for operator, candidate in [where]
        ],
        "skipped": [vars(skip) for skip in report.skips],
        "date": datetime.now(timezone.utc).date().isoformat(),
        "environment": summary.environment(report),
        "seeds": summary.seeds(report),
        "chosen": summary.chosen(report),
        "contract_version": report.plan.setting.contract.version,
    }


def _entry(check: Check, report: Report) -> dict[str, Any]:
    found = check.comparison
    entry = {
        "case_id": check.case_id,
        "relation": check.relation,
        "case": check.case,
        "output": check.item,
        "shape": list(check.shape),
        "dtype": check.dtype,
        "max_abs": _finite(found.max_abs),
        "mean_abs": _finite(found.mean_abs),
        "max_rel": _finite(found.max_rel),
        "worst": found.worst,
        "tolerance": check.tolerance,
        "row": check.row and " / ".join(check.row),
        "share": _finite(found.share),
        "passed": check.passed,
        "message": found.message,
        "seed": check.seed,
        "replay": report.replay(check),
    }
    return {**entry, "traceback": found.traceback} if found.traceback else entry


def _ran(seen: summary.Seen) -> dict[str, Any]:
    return {
        "dtype": seen.dtype,
        "cases": seen.cases,
        "backends": dict(seen.backends),
        "kernels": [
            {"name": name, "cases": count, "own": name in seen.own} for name, count in sorted(seen.kernels.items())
        ],
        "cases_with_own_kernels": seen.own_cases,
        "without_own_kernels": list(seen.without_own),
        "message": seen.fault,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
