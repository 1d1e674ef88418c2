"""Draw mutants of the operators' host code and Triton kernels, and count those that the tests catch.

Host code is everything of an operator that runs at a call, ``reference.py`` excepted. A mutant of a backend is shown to
the tests of that backend, any other to those of all backends that run on a CPU: recorded launches, the quick cases in
FP32, and Triton kernels in its interpreter. Mutants that crash are drawn again; known equivalents are left out. Tests
that fail without a mutant end the run. A record is continued; with ``--again`` its survivors are judged again.

``python tools/mutation.py --seed 1 --count 300 --json tools/results/mutation.json``; ``nox -s mutation`` runs it.
Exit status 1 if fewer than 95 % are caught.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from rl_kernels.lab.mutate.edits import Edit, drawn
from rl_kernels.lab.mutate.judge import CAUGHT, INVALID, SURVIVED, TIMEOUT, Stage, Verdict, judged

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tools" / "mutants_equivalent.json"
LEAST = 0.95
NOT_AT_A_CALL = ("__init__", "reference", "canary")
LAUNCHES = ("test_triton_launches.py", "test_cuda_launches.py", "test_planned.py")
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--no-header")
PLAIN = "not planted and not bug and not control"
CASES = f"test_relation and fp32 and {PLAIN} and not torch and not parity"
ONE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
SECONDS = {"smoke": 300, "launches": 300, "cases": 900, "interpreted": 900, "others": 900}


def modules(packages: Sequence[str]) -> dict[str, Path]:
    """Return the modules of the operators that run at a call, by dotted name."""
    files = {}
    for package in packages:
        source = ROOT / "packages" / package / "src"
        for file in sorted(source.rglob("*.py")):
            parts = file.relative_to(source).with_suffix("").parts
            if "spec" not in parts and not parts[-1].startswith(NOT_AT_A_CALL):
                files[".".join(parts)] = file
    return files


def stages(package: str, module: str, source: str) -> list[Stage]:
    """Return the tests that a mutant of this module is shown: those named after it, and the likeliest, come first."""
    tests = ROOT / "packages" / package / "tests"
    in_triton, in_cuda, in_native = (f".backends.{name}" in module for name in ("triton", "cuda", "native"))
    other_backend = "cuda" if in_triton else "triton" if in_cuda else "none"
    files = [tests / name for name in LAUNCHES if (tests / name).exists() and other_backend not in name]
    launches = [] if in_native else [_stage("launches", files, PLAIN)] if files else []
    cases = tests / "test_backends.py"
    if in_triton:
        interpreted = _stage("interpreted", [cases], f"triton and {CASES}", TRITON_INTERPRET="1")
        return [interpreted, *launches] if "triton.jit" in source else [*launches, interpreted]
    if in_cuda:
        return launches
    other_tests = {*tests.glob("test_*.py")} - {*files, cases}
    named_after = {file for file in other_tests if module.rpartition(".")[2] in file.name}
    other_tests = {
        file for file in other_tests - named_after if not any(word in file.name for word in ("bench", "far", "gpu"))
    }
    first = [_stage("others", named_after, PLAIN)] if named_after else []
    smoke = Stage((*PYTEST, str(tests), "-m", "smoke", "-k", PLAIN), ONE, SECONDS["smoke"])
    return [
        *first,
        smoke,
        _stage("cases", [cases], f"native and {CASES}"),
        *launches,
        _stage("others", other_tests, PLAIN),
    ]


def _stage(name: str, files: Iterable[Path], chosen: str, **environment: str) -> Stage:
    return Stage((*PYTEST, *map(str, sorted(files)), "-k", chosen), {**ONE, **environment}, SECONDS[name])


@cache
def fails_alone(test: str, environment: tuple[tuple[str, str], ...], seconds: int) -> str:
    """Return the message of a test that fails without a mutant; "" if it passes."""
    verdict = judged("", None, [Stage((*PYTEST, str(ROOT / test)), dict(environment), seconds)])
    return "" if verdict.state == SURVIVED else f"{test}: {verdict.said}"


def verdict_of(module: str, edit: Edit, shown: Sequence[Stage]) -> Verdict:
    """Judge a mutant; ``RuntimeError`` if the test that caught it fails without a mutant too."""
    for stage in shown:
        verdict = judged(module, edit, [stage])
        if verdict.state != SURVIVED:
            if verdict.where:
                said = fails_alone(verdict.where, tuple(sorted(stage.environment.items())), stage.seconds)
                if said:
                    raise RuntimeError(f"a test fails without a mutant: {said}")
            return verdict
    return Verdict(SURVIVED)


def entry(module: str, source: str, edit: Edit) -> dict[str, Any]:
    """Return the name of a mutant in a record and in the list of equivalents; it has no line number."""
    code = source.splitlines()[edit.line - 1].strip()
    return {"module": module, "code": code, "kind": edit.kind, "old": edit.old, "new": edit.new}


def known(mutant: dict[str, Any], equivalent: Sequence[dict[str, Any]]) -> bool:
    """Return whether a mutant is listed as equivalent."""
    return any(all(mutant[name] == listed[name] for name in mutant) for listed in equivalent)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw and judge mutants until enough are valid; print each, and return the record's entries."""
    files = modules(args.package)
    sources = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    equivalent = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    end = time.monotonic() + (args.seconds or float("inf"))
    judged_before = recorded(args.json, args.seed, again=args.again)

    def judge(drawn_one: tuple[dict[str, Any], str, Edit]) -> dict[str, Any] | None:
        mutant, name, edit = drawn_one
        if json.dumps(mutant) in judged_before:
            return judged_before[json.dumps(mutant)]
        if time.monotonic() > end:
            return None
        package = files[name].relative_to(ROOT / "packages").parts[0]
        verdict = verdict_of(name, edit, stages(package, name, sources[name]))
        print(f"{verdict.state:9}{name}:{edit.line} {edit.kind}: {edit.old} -> {edit.new} [{verdict.said}]", flush=True)
        return {**mutant, "state": verdict.state, "where": verdict.where}

    every = ((entry(name, sources[name], edit), name, edit) for name, edit in drawn(sources, args.seed))
    candidates = (candidate for candidate in every if not known(candidate[0], equivalent))
    judgments: dict[int, dict[str, Any]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        while missing := args.count - sum(judgment["state"] != INVALID for judgment in judgments.values()):
            first = len(judgments)
            places = {
                pool.submit(judge, candidate): first + number
                for number, candidate in enumerate(islice(candidates, missing))
            }
            for future in as_completed(places):
                try:
                    judgment = future.result()
                except RuntimeError:
                    # Otherwise the pool would judge all that waits before the error is seen.
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
                if judgment is None:
                    continue
                judgments[places[future]] = judgment
                if args.json:
                    write(args.json, args.seed, in_order(judgments))
            if len(judgments) < first + len(places) or not places:
                break
    return in_order(judgments)


def in_order(judgments: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return judgments in the order in which mutants are drawn."""
    return [judgments[number] for number in sorted(judgments)]


def recorded(path: Path | None, seed: int, *, again: bool) -> dict[str, dict[str, Any]]:
    """Return the judged mutants of a record with this seed, by the mutant's entry as JSON; ``again``: no survivors."""
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    judged_mutants = record["mutants"] if record["seed"] == seed else []
    return {
        json.dumps({name: mutant[name] for name in mutant if name not in ("state", "where")}): mutant
        for mutant in judged_mutants
        if not (again and mutant["state"] == SURVIVED)
    }


def write(path: Path, seed: int, judgments: Sequence[dict[str, Any]]) -> None:
    """Write the record, one mutant a line."""
    counts = Counter(judgment["state"] for judgment in judgments)
    lines = ",\n".join(map(json.dumps, judgments))
    path.write_text(f'{{"seed": {seed}, "counts": {json.dumps(counts)}, "mutants": [\n{lines}\n]}}\n', encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    operators = sorted(file.parents[3].name for file in ROOT.glob("packages/*/src/rl_kernels/*/op.py"))
    cli = argparse.ArgumentParser(description="Draw mutants of the operators, and count those that the tests catch.")
    cli.add_argument("--seed", type=int, default=1, help="which mutants are drawn (default: 1)")
    cli.add_argument("--count", type=int, default=300, help="how many, those that crash not counted (default: 300)")
    cli.add_argument("--package", nargs="+", choices=operators, default=operators, metavar="NAME", help="default: all")
    cli.add_argument("--jobs", type=int, default=1, help="mutants that are judged at once (default: 1)")
    cli.add_argument("--seconds", type=float, metavar="S", help="end after so long (default: when all are judged)")
    cli.add_argument("--json", type=Path, metavar="FILE", help="the record to write, or to continue")
    cli.add_argument("--again", action="store_true", help="judge the record's survivors again")
    args = cli.parse_args(argv)
    judgments = run(args)
    counts = Counter(judgment["state"] for judgment in judgments)
    valid = counts[CAUGHT] + counts[TIMEOUT] + counts[SURVIVED]
    score = (counts[CAUGHT] + counts[TIMEOUT]) / max(valid, 1)
    print(f"mutation score {score:.1%}: {valid} mutants, {', '.join(f'{n} {state}' for state, n in counts.items())}")
    return 0 if valid and score >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
