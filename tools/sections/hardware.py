"""The tables of checks and tests on a GPU, from the records of `run.py --record`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rl_kernels.lab.bench.report import as_table

DTYPES = ("bf16", "fp16", "fp32")
Parts = Mapping[str, Mapping[str, Any]]


def checks_and_tests(record: Mapping[str, Any]) -> str:
    """Return the tables of a record: checks by operator, backend and dtype, and tests by package."""
    checks = {name.split(" ")[1]: part for name, part in record["parts"].items() if name.startswith("check ")}
    tests = {name.split(" ")[1]: part for name, part in record["parts"].items() if name.startswith("tests ")}
    commits = sorted({part["commit"] for part in record["parts"].values() if "commit" in part})
    machine = {**record["environment"], "commit": ", ".join(commits)}
    ran_on = f"- ran on {', '.join(f'{name} {value}' for name, value in machine.items())}"
    parts = (_checks(checks), _programs(checks), _tests(tests), "\n".join((*_skips(checks, tests), ran_on)))
    return "\n\n".join(part for part in parts if part)


def _checks(parts: Parts) -> str:
    if not parts:
        return "The checker was not run."
    rows = [["passed of all checks", *(dtype.upper() for dtype in DTYPES)]]
    for name in dict.fromkeys(name.rpartition("/")[0] for name in parts):
        rows.append([name.replace("/", ", "), *(_check(parts.get(f"{name}/{dtype}")) for dtype in DTYPES)])
    return as_table(rows)


def _check(part: Mapping[str, Any] | None) -> str:
    if part is None or part["state"] != "ran":
        return _not_ran(part)
    passed = f"{part['checks'] - part['failed']:,} of {part['checks']:,}"
    unsound = not part["passed"] and not part["failed"]
    return f"{passed}{'; FAILED' if unsound else ''}"


def _not_ran(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return "not run"
    return f"stopped after {part['seconds']:.0f} s" if part["state"] == "stopped" else part["state"]


def _programs(parts: Parts) -> str:
    launched: dict[str, Counter[str]] = {}
    for name, part in parts.items():
        if part.get("programs"):
            launched.setdefault(name.rpartition("/")[0], Counter()).update(part["programs"])
    rows = [["launched by", "kernels, and in how many cases"]]
    for name, programs in launched.items():
        cells = (f"`{program}` {cases:,}" for program, cases in sorted(programs.items()))
        rows.append([name.replace("/", ", "), ", ".join(cells)])
    return as_table(rows) if launched else ""


def _tests(parts: Parts) -> str:
    if not parts:
        return "The tests were not run."
    rows = [["tests of", "passed", "failed", "skipped", "files that did not run"]]
    for package in dict.fromkeys(name.partition("/")[0] for name in parts):
        own = [part for name, part in parts.items() if name.partition("/")[0] == package]
        ran = [part for part in own if part["state"] == "ran"]
        skipped = sum(sum(part["skipped"].values()) for part in ran)
        failed = sum(part["failed"] for part in ran)
        passed = sum(part["tests"] for part in ran) - failed - skipped
        rows.append([package, *(f"{n:,}" for n in (passed, failed, skipped, len(own) - len(ran)))])
    return as_table(rows)


def _skips(*groups: Parts) -> Iterator[str]:
    for parts, group in zip(groups, ("checks", "tests"), strict=True):
        reasons = Counter[str]()
        for part in parts.values():
            for reason, number in part.get("skipped", {}).items():
                reasons[_kind(reason)] += number
        for reason, number in reasons.most_common():
            yield f"- skipped {group}: {number:,} x {reason}"
        for name, part in parts.items():
            for failure in part.get("failures", ()):
                yield f"- failed in {name}: {failure}"
            if "reason" in part:
                yield f"- {part['state']}, {name}: {part['reason']}"


def _kind(reason: str) -> str:
    """Return a reason without the size or the case that it names."""
    first = reason.splitlines()[0]
    return re.sub(r"(K|N|D)( = | is )\d+$", r"\1\2...", re.sub(r"the case \S+", "another case", first))
