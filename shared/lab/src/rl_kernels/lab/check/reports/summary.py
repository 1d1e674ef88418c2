"""Parts that all formats of a report share: names, groups, shares, versions."""

from __future__ import annotations

import math
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, TypeVar

import torch

from rl_kernels.lab.check.result import Check, Skip
from rl_kernels.lab.check.suite import Report

Item = TypeVar("Item")
Key = TypeVar("Key")

# Control characters (except newline and tab), and what XML 1.0 or UTF-8 cannot hold.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def suite_name(report: Report) -> str:
    """Return the name of the run: suite, dtypes and device."""
    dtypes = ",".join(dict.fromkeys(report.plan.dtypes))
    return f"rl-kernels {report.plan.suite} {dtypes} {report.plan.setting.device}"


def verdict(passed: bool) -> str:
    """Return PASS or FAIL."""
    return "PASS" if passed else "FAIL"


def percent(part: int, whole: int) -> str:
    """Return a share, rounded down, so that 100.0% always means all."""
    return f"{1000 * part // max(whole, 1) / 10:.1f}%"


def held(checks: Iterable[Check]) -> int:
    """Return the number of checks that passed."""
    return sum(check.passed for check in checks)


def checks_said(report: Report) -> str:
    """Return the counts of checks and skips in words."""
    share = percent(held(report.checks), len(report.checks))
    return f"{held(report.checks)} of {len(report.checks)} checks passed ({share}), {len(report.skips)} skipped"


def place(check: Check) -> str:
    """Return relation, case and item of a check, in words."""
    return f"{check.relation} {check.case}: {check.item}"


def shape_said(check: Check) -> str:
    """Return a shape as ``3x4``, or ``-`` if no tensor was measured."""
    return "x".join(map(str, check.shape)) or ("-" if math.isnan(check.comparison.max_abs) else "scalar")


def printable(text: str) -> str:
    """Escape control characters, and characters that XML or UTF-8 cannot hold."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by key; keys and items keep their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_candidate(report: Report) -> dict[tuple[str, str], list[Check]]:
    """Return the checks by operator and candidate."""
    return grouped(report.checks, lambda check: (check.operator, check.candidate))


def by_reason(report: Report) -> dict[tuple[str, str, str, str], list[Skip]]:
    """Return the skips by operator, candidate, relation and reason."""
    return grouped(report.skips, lambda skip: (skip.operator, skip.candidate, skip.relation, skip.reason))


class LaunchSummary(NamedTuple):
    """Backends and kernels that ran when a candidate was checked in one dtype."""

    operator: str
    candidate: str
    dtype: str
    cases: int
    backends: Mapping[str, int]
    """Backend that was chosen -> number of cases."""
    kernels: Mapping[str, int]
    """Kernel that was launched -> number of cases."""
    own: frozenset[str]
    """The kernels that are the backend's own."""
    own_cases: int | None
    """Number of cases that launched an own kernel; None for a candidate without kernels of its own."""
    without_own: tuple[str, ...]
    """Names of the cases that launched none of the backend's own kernels."""
    failed: bool
    """Whether the cases should have launched an own kernel, and none did."""

    @property
    def fault(self) -> str:
        """The error message; empty if there is none."""
        return f"none of its own kernels was launched in {self.cases} {self.dtype} cases" if self.failed else ""

    @property
    def kernels_said(self) -> list[str]:
        """The launched kernels in words; nothing for a candidate without kernels."""
        own = f"own kernels in {self.own_cases} of" if self.own_cases is not None else "kernels of"
        lines = [f"  in {count}: {name}{self.whose(name)}" for name, count in sorted(self.kernels.items())]
        return [f"{self.dtype}: {own} {self.cases} cases", *lines] if lines or self.own_cases is not None else []

    def whose(self, kernel: str) -> str:
        """Mark a kernel that is the backend's own."""
        return " (own)" if kernel in self.own else ""


def launch_summaries(report: Report) -> list[LaunchSummary]:
    """Return the backends and kernels that ran, by operator, candidate and dtype."""
    groups = grouped(report.launches, lambda record: (record.operator, record.candidate, record.dtype))
    summaries = []
    for key, cases in groups.items():
        has_own = [record.own is not None for record in cases]
        own = [record.own for record in cases if record.own]
        summaries.append(
            LaunchSummary(
                *key,
                cases=len(cases),
                backends=Counter(name for record in cases for name in record.backends),
                kernels=Counter(name for record in cases for name in record.kernels),
                own=frozenset(name for names in own for name in names),
                own_cases=len(own) if all(has_own) else None,
                without_own=tuple(record.case for record in cases if record.own == ()),
                failed=key in report.unlaunched,
            )
        )
    return summaries


def seeds(report: Report) -> dict[str, int]:
    """Return the seeds that the inputs and the upstream gradients come from."""
    return {"seed": report.plan.setting.seed, "grad_seed": report.plan.setting.grad_seed}


def chosen(report: Report) -> dict[str, str | int]:
    """Return the settings that replace a default: sizes of cases, upstream gradients and the contract's file."""
    setting = report.plan.setting
    replaced: dict[str, str | int] = dict(report.plan.sizes)
    if setting.grad_mode != "random":
        replaced["grad_mode"] = setting.grad_mode
    if setting.contract.file:
        replaced["contract_file"] = setting.contract.file
    return replaced


def environment(report: Report) -> dict[str, str]:
    """Return the versions and the device of a run."""
    setting = report.plan.setting
    on_gpu = setting.device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda or torch.version.hip or "-"),
        "triton": _version("triton"),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(setting.device) if on_gpu else platform.processor() or "cpu",
        "arch_key": setting.arch,
        "threads": str(torch.get_num_threads()),
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "-"
