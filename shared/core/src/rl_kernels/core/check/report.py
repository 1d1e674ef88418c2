"""A report as text for people and as strict JSON for programs."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator
from typing import Any

import torch

from rl_kernels.core.check.result import Check
from rl_kernels.core.check.suite import Report
from rl_kernels.core.contract import contract


def suite_name(report: Report) -> str:
    """Return the name of the run: suite, dtype and device."""
    setting = report.plan.setting
    return f"rl-kernels {report.plan.suite} {setting.dtype} {setting.device}"


def text(report: Report) -> Iterator[str]:
    """Yield a line for the suite, one a candidate, one a check, one for each reason of what was skipped."""
    yield (
        f"{_verdict(report.passed)} {suite_name(report)}: {sum(c.passed for c in report.checks)} of "
        f"{len(report.checks)} checks passed ({report.pass_rate:.1%}), {len(report.skips)} skipped"
    )
    for name, checks in _by_candidate(report).items():
        yield f"{_verdict(all(c.passed for c in checks))} {name}: {sum(c.passed for c in checks)} of {len(checks)}"
        for check in checks:
            yield "  " + _line(check)
    for (operator, candidate, relation, reason), count in _grouped_skips(report).items():
        yield f"skipped {operator} {candidate} {relation} ({count}): {reason}"


def _line(check: Check) -> str:
    found = check.comparison
    numbers = (
        ""
        if math.isnan(found.max_abs)
        else (f" max_abs={found.max_abs:.3g} mean_abs={found.mean_abs:.3g} max_rel={found.max_rel:.3g}")
    )
    shape = "x".join(map(str, check.shape)) or "scalar"
    line = f"{_verdict(check.passed)} {check.relation} {check.case}: {check.item} [{shape}] {check.dtype}"
    line += f"{numbers} tolerance={check.tolerance}"
    return line if check.passed else f"{line} seed={check.seed}: {found.message}"


def _verdict(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


def _by_candidate(report: Report) -> dict[str, list[Check]]:
    found: dict[str, list[Check]] = {}
    for check in report.checks:
        found.setdefault(f"{check.operator} {check.candidate}", []).append(check)
    return found


def _grouped_skips(report: Report) -> dict[tuple[str, str, str, str], int]:
    found: dict[tuple[str, str, str, str], int] = {}
    for skip in report.skips:
        key = (skip.operator, skip.candidate, skip.relation, skip.reason)
        found[key] = found.get(key, 0) + 1
    return found


def as_json(report: Report) -> str:
    """Return the report as strict JSON: a number that is not finite is null."""
    setting = report.plan.setting
    document = {
        "suite_name": suite_name(report),
        "passed": report.passed,
        "pass_rate": report.pass_rate,
        "candidates": [
            {
                "operator": checks[0].operator,
                "name": checks[0].candidate,
                "passed": all(check.passed for check in checks),
                "outputs": [_entry(check) for check in checks],
            }
            for checks in _by_candidate(report).values()
        ],
        "skipped": [vars(skip) for skip in report.skips],
        "environment": environment(report),
        "seeds": {"seed": setting.seed, "grad_seed": setting.grad_seed},
        "contract_version": contract().version,
    }
    return json.dumps(document, allow_nan=False, indent=2)


def _entry(check: Check) -> dict[str, Any]:
    found = check.comparison
    return {
        "relation": check.relation,
        "case": check.case,
        "output": check.item,
        "shape": list(check.shape),
        "dtype": check.dtype,
        "max_abs": _finite(found.max_abs),
        "mean_abs": _finite(found.mean_abs),
        "max_rel": _finite(found.max_rel),
        "tolerance": check.tolerance,
        "passed": check.passed,
        "message": found.message,
        "seed": check.seed,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def environment(report: Report) -> dict[str, str]:
    """Return versions and the device that a report was made with."""
    setting = report.plan.setting
    on_gpu = setting.device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(setting.device) if on_gpu else platform.processor() or "cpu",
        "arch_key": setting.arch,
        "threads": str(torch.get_num_threads()),
    }
