"""The steps of `run.py`: commands that test, check, measure and sanitize on this machine."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EACH = "each"
"""Stands for every backend of an operator."""
NOTHING_SELECTED = 5
"""Exit status of pytest."""


@dataclass(frozen=True)
class Step:
    """One command. It writes ``report``, a file in the output folder, or prints it, with ``prints``.

    It has passed if its exit status is one of ``good``.
    """

    group: str
    name: str
    command: list[str]
    report: str
    prints: bool = False
    good: tuple[int, ...] = (0,)

    @property
    def key(self) -> str:
        """Name of the step in a record."""
        return f"{self.group} {self.name}"


class Steps:
    """Makes the steps that the command line selects."""

    def __init__(
        self, args: argparse.Namespace, facts: Mapping[str, Any], out: Path, site: Path, environment: Mapping[str, str]
    ) -> None:
        self.args, self.facts, self.out, self.environment = args, facts, out, environment
        self.program = [sys.executable, str(site / "bin" / "rl-kernels")]

    def all(self) -> Iterator[Step]:
        """Yield the steps of the chosen groups."""
        makers = {"tests": self.tests, "check": self.checks, "bench": self.bench, "sanitize": self.sanitize}
        for group in self.args.only:
            yield from makers[group]()

    def tests(self) -> Iterator[Step]:
        """Yield the tests of each package, or for a record of each file with chosen tests."""
        for name, path in self._paths():
            report = f"tests-{name.replace('/', '-')}.xml"
            command = [*_pytest(path), "--junit-xml", str(self.out / report), *self.args.pytest]
            # If arguments select tests, a package may have none of them; pytest then exits with 5.
            yield Step("tests", name, command, report, good=(0, NOTHING_SELECTED) if self.args.pytest else (0,))

    def checks(self) -> Iterator[Step]:
        """Yield the checker on each operator, backend and dtype; of each backend, `native` comes last."""
        args, backends = self.args, self.facts["backends"]
        names = args.op or sorted(backends)
        available = [(name, backend) for name in names for backend in backends.get(name, ["auto"])]
        pairs = sorted(available, key=lambda pair: pair[1] == "native")
        if args.candidate != [EACH]:
            pairs = list(product(names, args.candidate))
        for (name, candidate), dtype in product(pairs, args.dtype):
            chosen = ["--op", name, "--dtype", dtype, "--candidate", candidate, "--device", args.device]
            chosen += ["--suite", args.suite, "--jobs", str(args.processes)]
            report = f"check-{name}-{candidate}-{dtype}.json"
            command = [*self.program, "check", *chosen, "--json"]
            yield Step("check", f"{name}/{candidate}/{dtype}", command, report, prints=True)

    def bench(self) -> Iterator[Step]:
        """Yield the benchmarks."""
        timed = [word for name in self.args.op or () for word in ("--op", name)]
        command = [*self.program, "bench", *timed, "--json", str(self.out / "bench.json")]
        yield Step("bench", "all", command, "bench.json")

    def sanitize(self) -> Iterator[Step]:
        """Yield the sanitizer."""
        command = [sys.executable, str(HERE / "sanitize.py"), "--json", str(self.out / "sanitize.json")]
        command += ["--op", *self.args.op] if self.args.op else []
        yield Step("sanitize", "all", command, "sanitize.json")

    def _paths(self) -> list[tuple[str, Path]]:
        folders = self._folders()
        if not self.args.record:
            return [(folder.parent.name, folder) for folder in folders]
        with ThreadPoolExecutor(len(folders)) as pool:
            files = [file for chosen_files in pool.map(self._chosen, folders) for file in chosen_files]
        return [(f"{file.parents[1].name}/{file.stem}", file) for file in files]

    def _folders(self) -> list[Path]:
        """Return the folders of the tests to run; the operators come first, because they take longest."""
        if self.args.op:
            # The steps of an unknown operator fail, and stop no others.
            names = (self.facts["distributions"].get(name, name) for name in self.args.op)
            return [HERE / "packages" / name.removeprefix("rl-kernels-") / "tests" for name in names]
        return [*sorted(HERE.glob("packages/*/tests")), *sorted(HERE.glob("shared/*/tests"))]

    def _chosen(self, folder: Path) -> list[Path]:
        """Return the files of a folder with tests that pytest's arguments select; all files if pytest fails."""
        command = [*_pytest(folder), "-q", "--collect-only", *self.args.pytest]
        done = subprocess.run(command, cwd=HERE, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode == NOTHING_SELECTED:
            return []
        # A line begins with the file: of each test, or with another -q of each file.
        names = {f"{line.partition('.py')[0]}.py" for line in done.stdout.splitlines() if ".py" in line}
        files = sorted(folder.glob("test_*.py"))
        chosen = [file for file in files if str(file.relative_to(HERE)) in names]
        return chosen if chosen and done.returncode == 0 else files


def _pytest(path: Path) -> list[str]:
    return [sys.executable, "-m", "pytest", str(path), "-p", "no:cacheprovider"]
