"""Draw mutants of the operators' host code and Triton kernels, and count those that the tests catch.

Host code is everything of an operator that runs at a call, ``reference.py`` excepted. The tests run once without a
mutant; each test's time and the lines that it executes are kept in ``.nox/mutation``. A mutant is then shown the tests
that execute its line, the quickest first, for at most a minute of CPU time; a line that importing the module runs
counts for all tests. Tests of the Triton backends run in Triton's interpreter; ``--without-triton`` leaves these tests
and backends out. Mutants that crash are drawn again; known equivalents are left out. At the end the tests that caught
mutants run once more without one; a test that fails without a mutant is an error. A record is continued; with
``--again`` its survivors are judged again.

``python tools/mutation.py --seed 2 --count 300 --json tools/results/mutation.json``; ``nox -s mutation`` runs it.
Exit status 1 if fewer than 95 % are caught.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from functools import cache
from itertools import accumulate, islice, product
from pathlib import Path
from typing import Any, NamedTuple

from rl_kernels.lab.mutate.edits import Edit, drawn, statement_at
from rl_kernels.lab.mutate.judge import CAUGHT, INVALID, SURVIVED, TIMEOUT, TracedTest, Verdict, judged, traced
from rl_kernels.lab.mutate.session import FORK

ROOT = Path(__file__).resolve().parent.parent
OPERATORS = sorted(file.parents[3].name for file in ROOT.glob("packages/*/src/rl_kernels/*/op.py"))
EQUIVALENT = ROOT / "tools" / "mutants_equivalent.json"
KEPT = ROOT / ".nox" / "mutation"
LEAST = 0.95
SHOWN_SECONDS = 60.0
NOT_DRAWN = ("__init__", "reference", "canary", "ahead")
"""How names of modules begin that are not run at a call."""
NOT_SHOWN = ("bench", "far", "gpu")
"""Parts of the names of files whose tests are about benchmarks, or need much memory or a GPU."""
LEFT_OUT = ("planted", "bug", "control", "inductor", "-parity-")
PARTS = {
    **{("test_backends.py", "interpreted"): 16, ("test_ranks.py", "interpreted"): 8},
    **{("test_backends.py", "plain"): 6},
}
"""Files whose tests take long in an environment, and the parts in which they run."""
TRITON = re.compile(r"\.backends\.triton|\.moe\.triton_lib")
BITS = ("launches", "repeatability", "invariance")
"""Tests of bits, which Triton's interpreter computes in another order than a GPU, and of launches, which it has not."""
PLAIN = " and ".join(["(not -torch- or -plain)", *(f"not {word}" for word in LEFT_OUT)])
INTERPRETED = " and ".join(["(not fp16 or plain)", *(f"not {word}" for word in ("-torch-", *LEFT_OUT, *BITS))])
ENVIRONMENTS: dict[str, tuple[str, dict[str, str]]] = {
    "plain": (PLAIN, {}),
    "interpreted": (f"triton and {INTERPRETED}", {"TRITON_INTERPRET": "1"}),
}
"""Which tests run, and the variables that they run with."""
ONE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class Mutant(NamedTuple):
    """An edit of a module, and how records name it."""

    module: str
    file: Path
    edit: Edit
    entry: dict[str, Any]


def modules() -> dict[str, Path]:
    """Return the modules of the operators that run at a call, by dotted name."""
    files = {}
    for package in OPERATORS:
        source = ROOT / "packages" / package / "src"
        for file in sorted(source.rglob("*.py")):
            parts = file.relative_to(source).with_suffix("").parts
            if "spec" not in parts and not parts[-1].startswith(NOT_DRAWN):
                files[".".join(parts)] = file
    return files


@cache
def sources_digest(*folders: Path) -> str:
    """Return a digest of the Python files of folders, those of tests excepted."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        if not file.name.startswith("test_"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def files_of(package: str) -> list[Path]:
    """Return the files of a package whose tests are shown."""
    files = sorted((ROOT / "packages" / package / "tests").glob("test_*.py"))
    return [file for file in files if not any(word in file.name for word in NOT_SHOWN)]


def parts_of(file: Path, environment: str) -> int:
    """Return the number of parts in which the tests of a file run."""
    return PARTS.get((file.name, environment), 1)


@cache
def tests_in(file: Path, environment: str, part: int) -> list[TracedTest]:
    """Return a part of the tests of a file with the lines that they execute; they run unless that is kept."""
    chosen, variables = ENVIRONMENTS[environment]
    package = ROOT / "packages" / package_of(file)
    digest = hashlib.sha256(f"{chosen} {sources_digest(package, ROOT / 'shared')} ".encode() + file.read_bytes())
    kept = KEPT / f"{package.name}-{file.stem}-{environment}-{part}-{digest.hexdigest()[:16]}.json"
    if not kept.exists():
        tests, failures = traced(
            package / "src", [str(file), "-k", chosen], variables, slice(part, None, parts_of(file, environment))
        )
        for failure in failures:
            print(f"left out, because it fails without a mutant: {failure}", flush=True)
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(tests), encoding="utf-8")
        seconds = sum(test.seconds for test in tests)
        print(f"{package.name}/{file.name} {part}, {environment}: {len(tests)} tests, {seconds:.0f} s", flush=True)
    return [TracedTest(*test) for test in json.loads(kept.read_text(encoding="utf-8"))]


@cache
def tests_of(package: str, environment: str) -> list[TracedTest]:
    """Return the tests of a package with the lines that they execute."""
    return [
        test
        for file in files_of(package)
        for part in range(parts_of(file, environment))
        for test in tests_in(file, environment, part)
    ]


def package_of(file: Path) -> str:
    """Return the folder's name of the package that a file belongs to."""
    return file.relative_to(ROOT / "packages").parts[0]


def first_pass(file: Path, environment: str, part: int) -> None:
    """Run a part of the tests of a file once, unless that is kept."""
    tests_in(file, environment, part)


def shown(mutant: Mutant, environment: str) -> list[TracedTest]:
    """Return the tests that execute the mutated line, the quickest first, as far as the time suffices.

    Of a line that importing the module runs, these are all tests; those that execute other lines of it are the first.
    """
    tests, file = tests_of(package_of(mutant.file), environment), str(mutant.file)
    statement = statement_at(mutant.file.read_text(encoding="utf-8"), mutant.edit.line)
    if statement is not None:
        lines = {*statement}
        tests = [test for test in tests if not lines.isdisjoint(test.lines.get(file, ()))]
    ordered = sorted(tests, key=lambda test: (file not in test.lines, test.seconds))
    seconds = accumulate(test.seconds for test in ordered)
    return [test for test, until in zip(ordered, seconds, strict=True) if until <= SHOWN_SECONDS]


def quickest_first(tests: Iterable[TracedTest]) -> list[TracedTest]:
    """Return tests by the time that they took."""
    return sorted(tests, key=lambda test: test.seconds)


def judge(mutant: Mutant, environments: Sequence[str], end: float) -> Verdict | None:
    """Judge a mutant unless time is over."""
    if time.monotonic() > end:
        return None
    for environment in environments:
        variables = ENVIRONMENTS[environment][1]
        verdict = judged(mutant.module, mutant.edit, shown(mutant, environment), variables)
        if verdict.state != SURVIVED:
            return verdict
    return Verdict(SURVIVED)


def check_without_mutant(package: str, environment: str, names: Collection[str]) -> None:
    """Run the tests by these names once more, in the order of mutants; ``RuntimeError`` if one fails."""
    tests = [test for test in quickest_first(tests_of(package, environment)) if test.name in names]
    verdict = judged("", None, tests, ENVIRONMENTS[environment][1])
    if verdict.state != SURVIVED:
        raise RuntimeError(f"a test fails without a mutant: {verdict.where}: {verdict.said}")


def candidates(seed: int) -> Iterator[Mutant]:
    """Yield mutants in the order that the seed gives, without the known equivalents."""
    files = modules()
    sources = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    equivalent = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    for module, edit in drawn(sources, seed):
        # An entry has no line number, so that it survives changes of other lines.
        code = sources[module].splitlines()[edit.line - 1].strip()
        entry = {"module": module, "code": code, "kind": edit.kind, "old": edit.old, "new": edit.new}
        if not any(all(entry[name] == listed[name] for name in entry) for listed in equivalent):
            yield Mutant(module, files[module], edit, entry)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw and judge mutants until enough are valid; print each, and return the record's entries."""
    parts = [*product(args.package, environments_of(args))]
    with ProcessPoolExecutor(args.jobs, FORK) as pool:
        try:
            files = [
                (file, environment, part)
                for package, environment in parts
                for file in files_of(package)
                for part in range(parts_of(file, environment))
            ]
            # The longest first, so that at the end none runs alone.
            files.sort(key=lambda one: (-parts_of(*one[:2]), -one[0].stat().st_size))
            for done in [pool.submit(first_pass, *part) for part in files]:
                done.result()
            judgments = judge_all(pool, args)
            names = {judgment["where"] for judgment in judgments.values()}
            for done in [pool.submit(check_without_mutant, *part, names) for part in parts]:
                done.result()
        except RuntimeError:
            # Otherwise the pool would judge all that waits before the error is seen.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return in_order(judgments, args.count)


def environments_of(args: argparse.Namespace) -> list[str]:
    """Return the environments in which tests run."""
    return [*ENVIRONMENTS] if args.triton else ["plain"]


def judge_all(pool: Executor, args: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Return the entries of judged mutants by their place in the draw; write the record after each."""
    drawn_mutants = (
        mutant
        for mutant in candidates(args.seed)
        if package_of(mutant.file) in args.package and (args.triton or not TRITON.search(mutant.module))
    )
    end = time.monotonic() + (args.seconds or float("inf"))
    core = ROOT / "shared" / "core" / "src"
    sources = {package: sources_digest(core, ROOT / "packages" / package / "src")[:16] for package in args.package}
    head = {"seed": args.seed, "sources": sources}
    before = recorded(args.json, head)
    judgments: dict[int, dict[str, Any]] = {}

    def record() -> None:
        if args.json:
            write(args.json, head, in_order(judgments, args.count))

    while (missing := args.count - sum(judgment["state"] != INVALID for judgment in judgments.values())) > 0:
        # More than are missing, because some will be invalid; only the first valid ones count.
        batch = dict(enumerate(islice(drawn_mutants, missing + missing // 4), len(judgments)))
        known = {number: before.get(json.dumps(mutant.entry)) for number, mutant in batch.items()}
        judgments.update((number, judgment) for number, judgment in known.items() if judgment)
        record()
        states = {number: judgment["state"] for number, judgment in known.items() if judgment}
        settled = {number for number, state in states.items() if not (args.again and state == SURVIVED)}
        waiting = {
            pool.submit(judge, batch[number], environments_of(args), end): number
            for number in batch
            if number not in settled
        }
        for future in as_completed(waiting):
            verdict, mutant = future.result(), batch[waiting[future]]
            if verdict is not None:
                edit, where = mutant.edit, {"state": verdict.state, "where": verdict.where}
                place = f"{mutant.module}:{edit.line} {edit.kind}"
                print(f"{verdict.state:9}{place}: {edit.old} -> {edit.new} [{verdict.said}]", flush=True)
                judgments[waiting[future]] = {**mutant.entry, **where}
                record()
        if len(batch) < missing or time.monotonic() > end:
            break
    return judgments


def in_order(judgments: Mapping[int, dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return judgments in the order in which mutants are drawn, up to so many that are valid."""
    ordered = [judgments[number] for number in sorted(judgments)]
    valid = accumulate(judgment["state"] != INVALID for judgment in ordered)
    return [judgment for judgment, place in zip(ordered, valid, strict=True) if place <= count]


def recorded(path: Path | None, head: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the mutants that a record with this seed judged in the same sources, by their entry as JSON."""
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    same = head["sources"].items() & record["sources"].items() if head["seed"] == record["seed"] else ()
    packages = tuple(f"rl_kernels.{package.replace('-', '_')}." for package, _ in same)
    return {
        json.dumps({name: mutant[name] for name in mutant if name not in ("state", "where")}): mutant
        for mutant in record["mutants"]
        if mutant["module"].startswith(packages)
    }


def write(path: Path, head: Mapping[str, Any], judgments: Sequence[dict[str, Any]]) -> None:
    """Write the record, one mutant a line."""
    counts = Counter(judgment["state"] for judgment in judgments)
    begin = json.dumps({**head, "counts": counts})[:-1]
    lines = ",\n".join(map(json.dumps, judgments))
    path.write_text(f'{begin}, "mutants": [\n{lines}\n]}}\n', encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    cli = argparse.ArgumentParser(description="Draw mutants of the operators, and count those that the tests catch.")
    cli.add_argument("--seed", type=int, default=2, help="which mutants are drawn (default: 2, that of the record)")
    cli.add_argument("--count", type=int, default=300, help="how many, those that crash not counted (default: 300)")
    cli.add_argument("--package", nargs="+", choices=OPERATORS, default=OPERATORS, metavar="NAME", help="default: all")
    cli.add_argument("--without-triton", dest="triton", action="store_false", help="leave out the Triton backends")
    cli.add_argument("--jobs", type=int, default=1, help="mutants that are judged at once (default: 1)")
    cli.add_argument("--seconds", type=float, metavar="S", help="end after so long (default: when all are judged)")
    cli.add_argument("--json", type=Path, metavar="FILE", help="the record to write, or to continue")
    cli.add_argument("--again", action="store_true", help="judge the record's survivors again")
    args = cli.parse_args(argv)
    os.chdir(ROOT)
    os.environ.update(ONE)
    # All processes share this import; OpenMP reads its variables here.
    importlib.import_module("torch")
    judgments = run(args)
    counts = Counter(judgment["state"] for judgment in judgments)
    valid = counts[CAUGHT] + counts[TIMEOUT] + counts[SURVIVED]
    score = (counts[CAUGHT] + counts[TIMEOUT]) / max(valid, 1)
    print(f"mutation score {score:.1%}: {valid} mutants, {', '.join(f'{n} {state}' for state, n in counts.items())}")
    return 0 if valid and score >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
