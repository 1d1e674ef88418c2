"""Compare a report with an earlier one, both as JSON documents: what fails now, what is gone, what grew."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GROWN = 2.0
"""An error that is more than this many times the earlier one is reported; it is still within its tolerance."""


@dataclass
class Changes:
    """The differences between two reports, each in words.

    The first two are regressions. Checks are matched by case id and output, a backend's kernels by dtype.
    """

    failed: list[str] = field(default_factory=list)
    """Checks that passed then and fail now, or are new and fail."""
    vanished: list[str] = field(default_factory=list)
    """Checks that ran then and do not run now."""
    fixed: list[str] = field(default_factory=list)
    """Checks that failed then and pass now."""
    new: list[str] = field(default_factory=list)
    """Checks that did not run then and pass now."""
    grown: list[str] = field(default_factory=list)
    """Checks that pass with an error of more than twice the earlier one."""
    settings: list[str] = field(default_factory=list)
    """Settings of the runs that differ, such as seeds and versions."""

    @property
    def regressed(self) -> bool:
        """Whether anything is worse than before."""
        return bool(self.failed or self.vanished)

    def document(self) -> dict[str, Any]:
        """Return the changes for the JSON report."""
        return {"regressed": self.regressed, **asdict(self)}

    def said(self) -> Iterator[str]:
        """Yield a line for each change, regressions last."""
        for kind in ("settings", "new", "grown", "fixed", "vanished", "failed"):
            for line in getattr(self, kind):
                yield f"{kind} {line}"


def read_report(path: Path) -> dict[str, Any]:
    """Read a report that ``--json`` printed.

    Raises:
        ValueError: it cannot be read, or is no such report; the one-line message names the file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refused)
        compared(document, document)
    except OSError as error:
        raise ValueError(f"--against: {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"--against: {path} is not a report of `rl-kernels check --json`: {error!r}") from error
    return document


def _refused(token: str) -> Any:
    raise ValueError(f"not strict JSON: {token}")


def compared(now: Mapping[str, Any], then: Mapping[str, Any]) -> Changes:
    """Compare two documents of ``document_of``."""
    changes = Changes()
    changes.settings += _settings(now, then)
    ours, theirs = _checks(now), _checks(then)
    for name, check in ours.items():
        _compare_check(changes, name, check, theirs.get(name))
    run = {check.get("case_id") for check in ours.values()} - {None}
    for name, old in theirs.items():
        # A call that raised has one check, "forward"; now that it returns, its outputs are checked instead.
        raised = not old["passed"] and old.get("case_id") in run
        if name not in ours:
            (changes.fixed if raised else changes.vanished).append(name)
    return changes


def _compare_check(changes: Changes, name: str, check: Mapping[str, Any], old: Mapping[str, Any] | None) -> None:
    if not check["passed"]:
        if old is None or old["passed"]:
            changes.failed.append(f"{name}: {' '.join(check['message'].split())}")
    elif old is None:
        changes.new.append(name)
    elif not old["passed"]:
        changes.fixed.append(name)
    elif (check["max_abs"] or 0.0) > GROWN * (old["max_abs"] or 0.0):
        changes.grown.append(f"{name}: max_abs {old['max_abs'] or 0.0:.3g}, now {check['max_abs']:.3g}")


def _checks(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the checks of a report by name, with the kernels of each backend as one more."""
    checks: dict[str, Mapping[str, Any]] = {}
    for candidate in document["candidates"]:
        for check in candidate["outputs"]:
            checks[f"{check['case_id']}: {check['output']}"] = check
        for ran in candidate.get("ran", ()):
            if ran["cases_with_own_kernels"] is not None:
                name = f"{candidate['operator']}/{candidate['name']}/{ran['dtype']}: own kernels"
                checks[name] = {"passed": not ran["message"], "message": ran["message"], "max_abs": None}
    for check in checks.values():
        _ = check["passed"], check["message"], check["max_abs"]
    return checks


def _settings(now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[str]:
    ours, theirs = (
        {
            **{"suite": document["suite_name"], "contract": document["contract_version"]},
            **{**document["seeds"], **document.get("chosen", {}), **document["environment"]},
        }
        for document in (now, then)
    )
    for name in dict.fromkeys((*theirs, *ours)):
        if theirs.get(name) != ours.get(name):
            yield f"{name}: {theirs.get(name)}, now {ours.get(name)}"
