"""Install the wheels next to this file and test them on this machine: `python run.py`; `--help` lists the options.

Needs torch, Triton, NumPy, rich and pytest (hypothesis and matplotlib for some tests), and no network. The steps are
the tests of each package, GPU tests included, the checker's full suite on every operator and dtype, the benchmarks, and
the sanitizer. Each has a time limit, and a failed step does not stop the next. Their output is in the output folder;
summary.json there says how each step ended, and is updated during the run. Exit status: 0 if all passed, 1 if not, 2 if
nothing could start.

With `--record FILE` the tests and checks are parts of one record: a call runs what FILE does not have yet, until
`--seconds` are over. Records are kept in tools/results, and tables.py shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from gpu_record import RAN, REFUSED, STOPPED, Record, part_of
from gpu_steps import EACH, Step, Steps
from limited import limited

HERE = Path(__file__).resolve().parent
GROUPS = ("tests", "check", "bench", "sanitize")
DTYPES = ("fp32", "bf16", "fp16")
LEAST = 20.0
"""No step is started with fewer seconds left."""
FACTS = """
import importlib.metadata as metadata, json, os, platform, sys, torch
from rl_kernels.core.registry import kernel_registry
from rl_kernels.lab.bench.environment import environment
import rl_kernels.core
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
names = ("rl-kernels-core", "triton", "numpy", "liger-kernel", "cut-cross-entropy", "quack-kernels")
versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
json.dump({
    "versions": {**versions, **{name: found for name in names if (found := version(name))}},
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    "operators": sorted(kernel_registry.names()),
    "distributions": {name: kernel_registry.load(name).distribution for name in kernel_registry.names()},
    "backends": {name: [each.name for each in kernel_registry.load(name).backends] for name in kernel_registry.names()},
    "environment": environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"), ("cuda-bindings",)),
    "from_wheels": os.path.dirname(rl_kernels.core.__file__).startswith(sys.argv[1]),
}, sys.stdout)
"""


class Runner:
    """Runs steps in the environment with the wheels."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out.resolve()
        self.site = HERE / "site"
        self.ended: list[dict[str, Any]] = []
        self.record: Record | None = None
        self.end = time.monotonic() + (args.seconds or float("inf"))
        self._one_writer = Lock()
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
        path = os.pathsep.join(filter(None, (str(self.site), os.environ.get("PYTHONPATH"))))
        self.environment = {**os.environ, **hidden, "PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"}

    def install(self) -> None:
        """Install all wheels into a fresh folder; exit with status 2 if pip fails, after its own message."""
        shutil.rmtree(self.site, ignore_errors=True)
        wheels = [str(wheel) for wheel in sorted((HERE / "wheels").glob("*.whl"))]
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(self.site), *wheels]
        if subprocess.run(command, check=False).returncode:
            sys.exit(2)

    def facts(self) -> dict[str, Any]:
        """Return versions, device and operators, as seen by a process that uses the wheels."""
        command = [sys.executable, "-c", FACTS, str(self.site)]
        return json.loads(subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, check=True).stdout)

    def run(self, step: Step) -> None:
        """Run a step if there is time for it, and record how it ended."""
        remaining = self.end - time.monotonic()
        before = self.record.parts[step.key].get("seconds", 0) if self.record else 0
        if remaining < max(LEAST, before):
            return
        report, log = self.out / step.report, self.out / f"{step.group}-{step.name.replace('/', '-')}.log"
        for stale in (report, log):
            stale.unlink(missing_ok=True)
        started = time.monotonic()
        with log.open("a") as errors, (report if step.prints else log).open("a") as output:
            status = limited(step.command, self.environment, min(self.args.timeout, remaining), output, errors)
        seconds = round(time.monotonic() - started, 1)
        part = part_of(status, seconds, report, log) if self.record else {"state": RAN}
        # In a record it is no failure that a backend does not take a dtype.
        passed = status in step.good or part["state"] == REFUSED
        verdict = part["state"] if part["state"] in (REFUSED, STOPPED) else "passed" if passed else f"FAILED ({status})"
        print(f"{verdict:<12} {step.group} {step.name}, {seconds} s", flush=True)
        command = [self._local(word) for word in step.command]
        ended = {"group": step.group, "name": step.name, "passed": passed, "exit": status, "seconds": seconds}
        self.ended.append({**ended, "command": command, "report": step.report, "counts": counts(report)})
        if self.record:
            with self._one_writer:
                self.record.add(step.key, part)

    def unfinished(self, steps: Sequence[Step], environment: Mapping[str, str]) -> list[Step]:
        """Open the record; return the steps that it does not have yet."""
        keyed = {step.key: step for step in steps}
        commit = (HERE / "commit").read_text(encoding="utf-8").strip()
        try:
            self.record = Record(self.args.record, environment, commit)
        except ValueError as error:
            parser().error(str(error))
        return [keyed[name] for name in self.record.unfinished(list(keyed))]

    def summarize(self, facts: dict[str, Any], planned: int) -> bool:
        """Write the summary of the steps so far; return whether all planned steps have ended and passed."""
        with self._one_writer:
            passed = len(self.ended) == planned and all(step["passed"] for step in self.ended)
            summary = {**facts, "passed": passed, "planned": planned, "steps": self.ended}
            (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return passed

    def _local(self, word: str) -> str:
        """Return a word of a command without the paths of this machine."""
        for folder, name in ((self.out, "OUT"), (HERE, ".")):
            word = word.replace(str(folder), name)
        return "python" if word == sys.executable else word


def counts(report: Path) -> dict[str, int]:
    """Return the counts of a report; nothing if it is missing or incomplete."""
    try:
        if report.suffix == ".xml":
            suites = list(ElementTree.parse(report).iter("testsuite"))
            return {
                name: sum(int(suite.get(name, 0)) for suite in suites)
                for name in ("tests", "failures", "errors", "skipped")
            }
        document = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError, ElementTree.ParseError):
        return {}
    if "candidates" in document:
        checks = [output["passed"] for candidate in document["candidates"] for output in candidate["outputs"]]
        return {"checks": len(checks), "failed": checks.count(False), "skipped": len(document["skipped"])}
    return {name: len(document[name]) for name in ("results", "records") if name in document}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description="Install the wheels next to this file and test them on this machine.")
    cli.add_argument("--out", type=Path, default=Path("results"), help="folder for the results (default: results)")
    cli.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="groups of steps (default: all)")
    cli.add_argument("--op", nargs="+", metavar="NAME", help="operators (default: all, and core)")
    cli.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES, help="dtypes to check (default: all)")
    candidates = f"backends to check; {EACH}: all that the operator has (default: triton)"
    cli.add_argument("--candidate", nargs="+", default=["triton"], metavar="NAME", help=candidates)
    cli.add_argument("--suite", choices=("quick", "full"), default="full", help="suite of the checker (default: full)")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu hides the GPU (default: cuda)")
    cli.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds per step (default: 600)")
    cli.add_argument("--jobs", type=int, default=4, help="steps of a group to run at once (default: 4)")
    cli.add_argument("--processes", type=int, default=1, metavar="N", help="processes of each check (default: 1)")
    cli.add_argument("--record", type=Path, metavar="FILE", help="keep a record; run only what it does not have yet")
    cli.add_argument("--seconds", type=float, metavar="S", help="end after so long (default: when all is done)")
    cli.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    for name in ("timeout", "jobs", "processes", "seconds"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser().error(f"--{name}: expected a number above 0, got {value:g}")
    if args.record and not {*args.only} <= {"tests", "check"}:
        parser().error("--record: holds tests and checks; expected --only tests, check or both")
    args.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(args)
    runner.install()
    facts = runner.facts()
    if not facts.pop("from_wheels"):
        parser().error("rl_kernels.core is not imported from these wheels")
    if args.device == "cuda" and facts["device"] == "cpu":
        parser().error("--device: torch sees no GPU here")
    steps = list(Steps(args, facts, runner.out, runner.site, runner.environment).all())
    if args.record:
        steps = runner.unfinished(steps, facts["environment"])
    facts = {name: facts[name] for name in ("versions", "device", "operators")}

    def run(step: Step) -> None:
        runner.run(step)
        runner.summarize(facts, len(steps))

    with ThreadPoolExecutor(args.jobs) as pool:
        for group in GROUPS:
            # Groups do not overlap, so benchmarks run alone.
            list(pool.map(run, [step for step in steps if step.group == group]))
    return 0 if runner.summarize(facts, len(steps)) else 1


if __name__ == "__main__":
    sys.exit(main())
