"""The record of checks and tests on a GPU that `run.py --record FILE` keeps: each call fills in what it does not have.

A part is one operator, backend and dtype of the checker, or one file of tests. Its ``state`` is `ran`, `refused` (the
backend does not take the dtype), `stopped` (by a time limit), `broken` (no report came) or `not run`. Each part that
was tried names its commit.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from limited import TIMED_OUT

RAN, REFUSED, STOPPED, BROKEN, NOT_RUN = "ran", "refused", "stopped", "broken", "not run"
VARIES = {"date", "threads"}
"""Environment entries that may differ between the calls that fill a record."""
MOST_FAILURES = 20
"""Largest number of failures that a part lists."""
CANNOT_RUN = 2
"""Exit status of the checker where a candidate cannot run."""


class Record:
    """A record in a file.

    Raises:
        ValueError: the file holds the record of another device or version.
    """

    def __init__(self, path: Path, environment: Mapping[str, str], commit: str) -> None:
        self._path, self._environment, self._commit = path, dict(environment), commit
        self.parts: dict[str, dict[str, Any]] = {}
        if path.exists():
            document = json.loads(path.read_text(encoding="utf-8"))
            self._environment, self.parts = document["environment"], document["parts"]
            names = {*environment, *self._environment} - VARIES
            other = sorted(name for name in names if self._environment.get(name) != environment.get(name))
            if other:
                raise ValueError(f"--record: {path} was made with another {', '.join(other)}; name another file")

    def unfinished(self, names: Sequence[str]) -> list[str]:
        """Add the planned parts; return the unfinished ones, first those that ran longest before they were stopped."""
        for name in names:
            self.parts.setdefault(name, {"state": NOT_RUN})
        self.write()
        return sorted(
            (name for name in names if self.parts[name]["state"] not in (RAN, REFUSED)),
            key=lambda name: -self.parts[name].get("seconds", 0),
        )

    def add(self, name: str, part: dict[str, Any]) -> None:
        """Add the result of a part, and write the file."""
        self.parts[name] = {**part, "commit": self._commit}
        self.write()

    def write(self) -> None:
        """Write the file, a line for each part; a call that is killed leaves it whole."""
        lines = (f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in sorted(self.parts.items()))
        head = f'{{"environment": {json.dumps(self._environment)}, "parts": {{\n'
        whole = self._path.with_name(f"{self._path.name}.new")
        whole.write_text(head + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
        whole.replace(self._path)


def part_of(status: int, seconds: float, report: Path, log: Path) -> dict[str, Any]:
    """Return a record's entry for a command that ended with this status and wrote this report."""
    if status == TIMED_OUT:
        return {"state": STOPPED, "seconds": seconds}
    try:
        counts = _tests(report) if report.suffix == ".xml" else _checks(report)
    except (OSError, ValueError, ElementTree.ParseError):
        said = log.read_text(encoding="utf-8").strip().splitlines() or [f"exit status {status}"]
        state = REFUSED if status == CANNOT_RUN and report.suffix == ".json" else BROKEN
        return {"state": state, "seconds": seconds, "reason": said[-1]}
    return {"state": RAN, "exit": status, "seconds": seconds, **counts}


def _checks(report: Path) -> dict[str, Any]:
    document = json.loads(report.read_text(encoding="utf-8"))
    outputs = [output for candidate in document["candidates"] for output in candidate["outputs"]]
    failed = [f"{output['case_id']}, {output['output']}" for output in outputs if not output["passed"]]
    ran = [candidate_run for candidate in document["candidates"] for candidate_run in candidate.get("ran", ())]
    messages = [candidate_run["message"] for candidate_run in ran if candidate_run["message"]]
    counted = {"checks": len(outputs), "failed": len(failed), "passed": document["passed"]}
    programs = Counter[str]()
    for candidate_run in ran:
        programs.update({kernel["name"]: kernel["cases"] for kernel in candidate_run["kernels"]})
    launched = {"programs": dict(programs)} if ran else {}
    skipped = Counter(skip["reason"] for skip in document["skipped"])
    return {**counted, **_named([*messages, *failed]), "skipped": dict(skipped), **launched}


def _tests(report: Path) -> dict[str, Any]:
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skips = [case.find("skipped") for case in cases]
    skipped = Counter(skip.get("message", "") for skip in skips if skip is not None)
    named = _named([f"{case.get('classname')}::{case.get('name')}" for case in failed])
    return {"tests": len(cases), "failed": len(failed), **named, "skipped": dict(skipped)}


def _named(failures: Sequence[str]) -> dict[str, list[str]]:
    return {"failures": list(dict.fromkeys(failures))[:MOST_FAILURES]} if failures else {}
