"""Run a plan and return its records."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rl_kernels.core.operator import arch_of
from rl_kernels.lab.check.plan import Plan
from rl_kernels.lab.check.result import Check, Launches, Outcome, Record, Skip

CTRL_C = "Ctrl-C"


class Stopped(RuntimeError):
    """A run cannot go on; the message says why."""


@dataclass(frozen=True)
class Report:
    """The records of a run."""

    plan: Plan
    records: tuple[Record, ...]
    interrupted: str = ""
    """Reason why the run stopped early; empty if it did not."""
    launches: tuple[Launches, ...] = ()
    """Backends and kernels that ran, for each case that a backend was checked on."""

    @property
    def checks(self) -> list[Check]:
        """The checks that ran."""
        return [record for record in self.records if isinstance(record, Check)]

    @property
    def skips(self) -> list[Skip]:
        """The checks that did not run."""
        return [record for record in self.records if isinstance(record, Skip)]

    @property
    def passed(self) -> bool:
        """Whether the run passed.

        At least one check ran, every check passed, each backend launched kernels of its own, and nothing stopped the
        run.
        """
        holds = bool(self.checks) and all(check.passed for check in self.checks)
        return holds and not self.interrupted and not self.unlaunched

    @property
    def unlaunched(self) -> set[tuple[str, str, str]]:
        """Operator, candidate and dtype of the backends that launched none of their own kernels in any case.

        Only tested dtypes count: a case may have another one. A replay runs one case, which need not launch them.
        """
        if self.plan.case:
            return set()
        with_own = [entry for entry in self.launches if entry.own is not None and entry.dtype in self.plan.dtypes]
        launched = {(entry.operator, entry.candidate, entry.dtype) for entry in with_own if entry.own}
        return {(entry.operator, entry.candidate, entry.dtype) for entry in with_own} - launched

    @property
    def pass_rate(self) -> float:
        """Share of the checks that passed, 0 if none ran."""
        return sum(check.passed for check in self.checks) / max(len(self.checks), 1)

    def replay(self, check: Check) -> str:
        """Return the command that runs a check's relation on its case again, on the same inputs."""
        plan, setting = self.plan, self.plan.setting
        words = ["rl-kernels", "check", "--replay", check.case_id, "--device", str(setting.device)]
        words += ["--seed", str(setting.seed), "--grad-seed", str(setting.grad_seed)]
        if setting.grad_mode != "random":
            words += ["--grad-mode", setting.grad_mode]
        if setting.arch != arch_of(setting.device.type, setting.device.index):
            words += ["--arch-key", setting.arch]
        if setting.contract.file:
            words += ["--contract", setting.contract.file]
        for name, size in plan.sizes.items():
            words += [f"--{name.replace('_', '-')}", str(size)]
        if plan.constant is not None:
            value, token = plan.constant
            # With "=": a value such as -1e-05 alone reads as an option.
            words += ["--input-mode", "constant", f"--constant-value={value}", "--token-value", str(token)]
        return shlex.join(words)


def run(
    plan: Plan,
    skips: Sequence[Skip] = (),
    progress: Callable[[str], None] = lambda what: None,
    results: Callable[[Plan], Iterator[tuple[str, Iterable[Outcome]]]] | None = None,
) -> Report:
    """Run every relation of the plan on every cell.

    Ctrl-C and ``Stopped`` end it early: the report then holds what is known so far.

    Args:
        plan: the plan to run.
        skips: records of candidates that are not in the plan.
        progress: called with the name of each task.
        results: returns the names and records of the tasks, in the plan's order; by default the tasks run one after
            the other in this process.
    """
    records: list[Record] = list(skips)
    launches: list[Launches] = []
    interrupted = ""
    try:
        for outcome in _outcomes(in_turn(plan) if results is None else results(plan), progress):
            if isinstance(outcome, Launches):
                launches.append(outcome)
                continue
            records.append(outcome)
            if plan.fails_fast and isinstance(outcome, Check) and not outcome.passed:
                break
    except KeyboardInterrupt:
        interrupted = CTRL_C
    except Stopped as error:
        interrupted = str(error)
    finally:
        plan.stop()
    return Report(plan, tuple(records), interrupted, tuple(launches))


def in_turn(plan: Plan) -> Iterator[tuple[str, Iterable[Outcome]]]:
    """Run one task after the other, in this process."""
    for task in plan.tasks():
        yield task.name, task.run()


def _outcomes(results: Iterator[tuple[str, Iterable[Outcome]]], progress: Callable[[str], None]) -> Iterator[Outcome]:
    for name, records in results:
        progress(name)
        yield from records
