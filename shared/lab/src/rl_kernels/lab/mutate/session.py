"""Run pytest in forked processes, which share what this process has imported; nothing is written to the tree.

Import torch and pytest first, but no operator and no Triton: each child imports them anew, Triton after its environment
is set. Ranks that a test starts are forked from it: they have its mutant, and the lines that they execute are its own.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import pytest

from rl_kernels.lab.mutate.edits import Edit

FORK = multiprocessing.get_context("fork")
ARGUMENTS = ("-q", "-p", "no:cacheprovider", "--no-header")
COLLECTING = 60.0
"""Seconds of CPU time that collection may take."""
PATIENCE = 8
"""Wall-clock limit, as a multiple of a limit of CPU time: other processes may use the cores too."""


class Ended(NamedTuple):
    """The end of a child: its exit code, and the last report that it wrote."""

    code: int
    report: Any


def forked(report: Callable[[Path], None], environment: Mapping[str, str]) -> Ended:
    """Run ``report`` in a child with these variables; it writes JSON to the file that it is called with."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        child = FORK.Process(target=_in_child, args=(report, out, environment))
        child.start()
        child.join()
        return Ended(child.exitcode or 0, json.loads(out.read_text(encoding="utf-8")) if out.exists() else None)


def _in_child(report: Callable[[Path], None], out: Path, environment: Mapping[str, str]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.environ.update(environment)
    report(out)


def limit_time(seconds: float) -> None:
    """End this process by a signal once it has used so many seconds of a core, or waited ``PATIENCE`` times as long."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with an edit of its source."""

    def __init__(self, module: str, edit: Edit) -> None:
        self._module, self._edit = module, edit

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as usual, and load it with this loader."""
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        return importlib.util.spec_from_loader(fullname, self, origin=spec.origin) if spec else None

    def exec_module(self, module: ModuleType) -> None:
        """Run the edited source; Triton reads it from the cache of lines."""
        origin = str(module.__spec__ and module.__spec__.origin)
        text = self._edit.applied(Path(origin).read_text(encoding="utf-8"))
        module.__file__, file = origin, f"<{self._module}, mutated>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), vars(module))


class Plugin:
    """Pytest plugin: ranks are forked from the process that runs a test."""

    def pytest_configure(self) -> None:
        """Import what starts ranks, now that pytest has loaded its plugins, and replace how."""
        importlib.import_module("rl_kernels.core.testing.ranks").context = lambda: FORK  # type: ignore[attr-defined]


class Chosen(Plugin):
    """Pytest plugin: runs tests in a given order, each with a limit of its CPU time; reports the first failure.

    The report has the test that runs, and at the end pytest's exit status and the first failure.
    """

    def __init__(self, limits: Mapping[str, float], out: Path) -> None:
        self._limits, self._out = limits, out
        self._failure: dict[str, str] | None = None
        self._limit = 0.0
        register_after_fork(self, Chosen.limit_rank)

    def limit_rank(self) -> None:
        """Limit the time of a process that the test forked; it inherits no limit."""
        limit_time(self._limit)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the chosen tests, in their order."""
        order = {name: place for place, name in enumerate(self._limits)}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Report which test runs, and limit its time."""
        self._out.write_text(json.dumps({"test": item.nodeid}), encoding="utf-8")
        self._limit = self._limits[item.nodeid]
        limit_time(self._limit)

    def pytest_exception_interact(
        self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any], report: Any
    ) -> None:
        """Keep the first failure; any error while a file of tests is imported counts as an ImportError."""
        if self._failure is None and call.excinfo is not None:
            # Of the traceback of a rank, the end has the error.
            text = str(call.excinfo.value)
            message = text if len(text) < 4000 else f"{text[:2000]} ... {text[-2000:]}"
            name = call.excinfo.typename if isinstance(node, pytest.Item) else "ImportError"
            self._failure = {"test": node.nodeid, "type": name, "message": message}

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the report."""
        limit_time(0)
        self._out.write_text(json.dumps({"status": int(exitstatus), "failure": self._failure}), encoding="utf-8")


class TooLong(BaseException):
    """Raised in a test that takes too long to be shown to mutants; handlers may turn it into another exception."""


class Traced(Plugin):
    """Pytest plugin: reports each test's outcome, its CPU time, and which lines of a folder's files it executed.

    ``part`` is a slice of the collected tests: the others are left out.
    """

    def __init__(self, folder: Path, limit: float, part: slice, out: Path) -> None:
        self._prefix, self._limit, self._part, self._out = f"{folder}/", limit, part, out
        self._is_too_long = False
        self._lines: dict[str, set[int]] = defaultdict(set)
        self._tests: dict[str, dict[str, Any]] = {}
        register_after_fork(self, Traced.report_rank)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave a part of the tests."""
        items[:] = items[self._part]

    def report_rank(self) -> None:
        """Report the lines of a process that the test forked, when it ends."""
        Finalize(self, self._write_lines, exitpriority=0)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Trace a test with its fixtures."""
        self._lines.clear()
        self._is_too_long = False
        test = self._tests[item.nodeid] = {"outcomes": {}}
        signal.signal(signal.SIGPROF, self._stop)
        signal.setitimer(signal.ITIMER_PROF, self._limit)
        begin = sum(os.times()[:4])
        sys.settrace(self._called)
        yield
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        # With the time of the processes that it forked, and their lines.
        test["seconds"] = sum(os.times()[:4]) - begin
        for file in self._out.parent.glob("rank-*.json"):
            for name, lines in json.loads(file.read_text(encoding="utf-8")).items():
                self._lines[name].update(lines)
            file.unlink()
        test["lines"] = {file: sorted(lines) for file, lines in self._lines.items()}

    def _write_lines(self) -> None:
        sys.settrace(None)
        lines = {file: [*lines] for file, lines in self._lines.items()}
        (self._out.parent / f"rank-{os.getpid()}.json").write_text(json.dumps(lines), encoding="utf-8")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Keep the outcome of a test, and the message of a failure."""
        outcome: Any = yield
        report = outcome.get_result()
        self._tests[item.nodeid]["outcomes"][report.when] = "too long" if self._is_too_long else report.outcome
        if report.failed and call.excinfo is not None:
            self._tests[item.nodeid]["message"] = f"{call.excinfo.typename}: {call.excinfo.value}"[:500]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the report."""
        self._out.write_text(json.dumps({"status": int(exitstatus), "tests": self._tests}), encoding="utf-8")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._is_too_long = True
        raise TooLong

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._prefix) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self._lines[frame.f_code.co_filename].add(frame.f_lineno)
        return self._line
