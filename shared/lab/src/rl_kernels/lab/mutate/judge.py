"""Show a mutant to the tests that execute its line, the quickest first, until one fails."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rl_kernels.lab.mutate.edits import Edit
from rl_kernels.lab.mutate.session import ARGUMENTS, COLLECTING, Chosen, Ended, Mutated, Traced, forked, limit_time

CAUGHT, TIMEOUT, SURVIVED, INVALID = "caught", "timeout", "survived", "invalid"
CRASHES = ("TypeError", "NameError", "UnboundLocalError", "SyntaxError", "AttributeError", "ImportError")
_NAMES = f"(?:{'|'.join(CRASHES)})"
_IN_KERNEL = r"(?:InterpreterError\W+)*"
CRASHED = re.compile(
    rf"\b(?:raised|got) {_IN_KERNEL}{_NAMES}\b|\A{_IN_KERNEL}{_NAMES}\(|\Arank \d+ raised:.*^{_NAMES}: ",
    re.DOTALL | re.MULTILINE,
)
"""Matches the message of a check whose implementation crashed, of Triton's interpreter, or of a rank that did."""
PASSED, NOTHING_SELECTED = 0, 5
LEAST = 10.0
"""Seconds of a core that any test may take with a mutant: the first of a process loads what others find loaded."""
LONG = 60.0
"""Tests that take more seconds of a core than this, with the trace, are not shown to mutants."""


class TracedTest(NamedTuple):
    """A test without a mutant: its node id, seconds of CPU time, and the lines that it executed, by file."""

    name: str
    seconds: float
    lines: Mapping[str, Sequence[int]]

    @property
    def limit(self) -> float:
        """Seconds of CPU time that it may take with a mutant."""
        return LEAST + 2 * self.seconds


class Verdict(NamedTuple):
    """The outcome of a mutant, and the test that caught it."""

    state: str
    where: str = ""
    said: str = ""


def traced(
    folder: Path, arguments: Sequence[str], environment: Mapping[str, str], part: slice = slice(None)
) -> tuple[list[TracedTest], list[str]]:
    """Run tests once without a mutant, or a part of them, and trace the files of a folder.

    Tests that are skipped or long, or that fail, are left out.

    Returns:
        The tests, and what the tests that fail said.

    Raises:
        RuntimeError: pytest does not end.
    """
    ended = forked(partial(_trace, folder, arguments, part), environment)
    if ended.report is None:
        raise RuntimeError(f"the process of {' '.join(arguments)} ended with {ended.code}")
    tests, failures = [], []
    for name, test in ended.report["tests"].items():
        outcomes = {*test["outcomes"].values()}
        if "failed" in outcomes:
            failures.append(f"{name}: {test['message']}")
        elif outcomes == {"passed"}:
            tests.append(TracedTest(name, test["seconds"], test["lines"]))
    return tests, failures


def judged(module: str, edit: Edit | None, tests: Sequence[TracedTest], environment: Mapping[str, str]) -> Verdict:
    """Return the verdict of the first test that fails with ``edit`` in the module; without one, nothing is changed.

    A crash (``TypeError`` and the like, an error in an import, the end of the process) is no failure of a check: any
    call would show it.
    A test that takes too long is run again, alone and with four times the time.
    """
    shown = list(tests)
    while shown:
        verdict = _verdict(_run(module, edit, {test.name: test.limit for test in shown}, environment))
        names = [test.name for test in shown]
        if verdict.state != TIMEOUT or verdict.where not in names:
            return verdict
        place = names.index(verdict.where)
        again = _verdict(_run(module, edit, {verdict.where: 4 * shown[place].limit}, environment))
        if again.state != SURVIVED:
            return again
        shown = shown[place + 1 :]
    return Verdict(SURVIVED)


def _trace(folder: Path, arguments: Sequence[str], part: slice, out: Path) -> None:
    pytest.main([*ARGUMENTS, *arguments], plugins=[Traced(folder, LONG, part, out)])


def _run(module: str, edit: Edit | None, limits: Mapping[str, float], environment: Mapping[str, str]) -> Ended:
    return forked(partial(_show, module, edit, limits), environment)


def _show(module: str, edit: Edit | None, limits: Mapping[str, float], out: Path) -> None:
    if edit is not None:
        sys.meta_path.insert(0, Mutated(module, edit))
    limit_time(COLLECTING)
    files = dict.fromkeys(name.partition("::")[0] for name in limits)
    pytest.main(["-x", *ARGUMENTS, *files], plugins=[Chosen(limits, out)])


def _verdict(ended: Ended) -> Verdict:
    report: dict[str, Any] = ended.report or {}
    if ended.code in (-signal.SIGPROF, -signal.SIGALRM):
        return Verdict(TIMEOUT, report.get("test", ""), "it takes too long")
    if "status" not in report:
        return Verdict(INVALID, said=f"the process ended with {ended.code}")
    if report["status"] in (PASSED, NOTHING_SELECTED):
        return Verdict(SURVIVED)
    failure = report["failure"] or {"test": "", "type": "", "message": f"pytest ended with {report['status']}"}
    crashed = failure["type"] in CRASHES or CRASHED.search(failure["message"])
    return Verdict(INVALID if crashed else CAUGHT, failure["test"], f"{failure['type']}: {failure['message'][:160]}")
