"""The tests that every operator package runs: subclass ``Conformance`` in its tests and name the operator.

    class TestConformance(Conformance):
        operator = OPERATOR

The rules are the project's rules for operators: one signature, one validator, repeatable, invariant, torch-native, no
silent fallback, global state unchanged.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest
import torch

from rl_kernels.core import canary
from rl_kernels.core.contract import DTYPES
from rl_kernels.core.dispatch import AUTO, BackendUnavailable
from rl_kernels.core.operator import INVARIANT, Operator, arch_of
from rl_kernels.core.testing import Case, Spec, spec_of
from rl_kernels.core.testing.planted import Bug, Mutants, places
from rl_kernels.lab.check.candidate import backend_candidate
from rl_kernels.lab.check.cell import Cell, call_of
from rl_kernels.lab.check.far import FarApart
from rl_kernels.lab.check.mutation import Baseline
from rl_kernels.lab.check.mutation.controls import CONTROLS
from rl_kernels.lab.check.relations import RELATIONS, check_relation
from rl_kernels.lab.check.repeat import differing_runs
from rl_kernels.lab.check.result import Check, Skip
from rl_kernels.lab.check.rules import Rules, cell, device, fits, runnable, setting_of

CHECKED = {"fp32": tuple(RELATIONS), "bf16": ("accuracy", "gradients", "invariance"), "fp16": ("accuracy", "gradients")}
"""Relations by dtype; the CPU computes every dtype in FP32, so bits are not checked in a third dtype."""
HALVES = ("bf16", "fp16")
"""Dtypes of which a CPU checks a generated case in one."""
SMALL, SHORT = 5000, 40
"""Largest product of the sizes, and largest size (except the last), of generated cases in Triton's interpreter."""


class Conformance(Rules, FarApart):
    """Checks the rules for ``operator``, on every backend that runs here and every quick case."""

    operator: ClassVar[Operator]
    large: ClassVar[Sequence[Case]] = ()
    """Calls that fill a GPU, one for each way a backend may split its work; by default the operator's plainest case."""
    planted: ClassVar[Sequence[Mutants]] = ()
    """Bugs in its backends that the quick cases must catch."""
    smoke: ClassVar[Sequence[str]] = ()
    """Cases whose accuracy and gradients in FP32, and of the first the invariance too, are quick tests."""
    interpreted: ClassVar[Mapping[str, int]] = {}
    """Largest sizes of the named cases in Triton's interpreter, where each row takes milliseconds."""

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Parametrize the tests by the operator's quick cases, dtypes, relations and backends."""
        spec = spec_of(cls.operator)
        cases = [case for case in spec.cases if case.suite == "quick" and fits(case)]
        if "relation" in metafunc.fixturenames:
            starts = {bad.case or cases[0].name for bad in spec.illegal}
            names = [
                pytest.param(
                    *(backend, relation, dtype, cls._resized(case) if _runs_interpreted(backend) else case),
                    id=f"{backend}-{relation}-{dtype}-{case.name}",
                    marks=[pytest.mark.smoke] * cls._is_smoke(backend, relation, dtype, case),
                )
                for backend in runnable(cls.operator)
                for dtype, relations in CHECKED.items()
                if not (_runs_interpreted(backend) and dtype == "bf16")
                for relation in relations
                for case in cases
                if not _runs_interpreted(backend) or _is_checked_interpreted(spec, cls.planted, case, relation, dtype)
                if not case.relations or relation in case.relations
                if not case.relations or dtype != HALVES[zlib.crc32(case.name.encode()) % 2] or device().type == "cuda"
                # A case with its own dtype is the same in every run.
                if not case.dtype or dtype == next(iter(CHECKED))
                if relation != "robustness" or case.name in starts
                if relation != "parity" or len(runnable(cls.operator)) > 1
            ]
            metafunc.parametrize(("backend", "relation", "dtype", "case"), names)
        elif "quick_case" in metafunc.fixturenames:
            metafunc.parametrize(
                "quick_case", [case for case in cases if not case.relations], ids=lambda case: case.name
            )
        elif "large_case" in metafunc.fixturenames:
            params = [
                pytest.param(name, case, id=f"{name}-{case.name}")
                for name in _accelerated(cls.operator)
                for case in cls.large or cases[:1]
            ]
            metafunc.parametrize(("backend", "large_case"), params)
        elif "far_case" in metafunc.fixturenames:
            params = [
                pytest.param(name, case, id=f"{name}-{case.name}", marks=[pytest.mark.gpu] * (device().type == "cuda"))
                for name in runnable(cls.operator, "fp16")
                for case in cls.far
                if fits(case)
            ]
            metafunc.parametrize(("backend", "far_case"), params)
        elif "bug" in metafunc.fixturenames:
            bugs = [
                pytest.param(mutants, bug, id=f"{mutants.backend}-{bug.name}")
                for mutants in cls.planted
                if mutants.backend in _backends_with_all_promises(cls.operator)
                for bug in mutants.bugs
            ]
            metafunc.parametrize(("mutants", "bug"), bugs)
        elif "control" in metafunc.fixturenames:
            controls = [(relation, name) for relation, names in CONTROLS.items() for name in names]
            metafunc.parametrize(("catching", "control"), controls if _backends_with_all_promises(cls.operator) else [])

    @classmethod
    def _is_smoke(cls, backend: str, relation: str, dtype: str, case: Case) -> bool:
        if (backend, dtype) != ("native", "fp32") or case.name not in cls.smoke:
            return False
        return relation in ("accuracy", "gradients", "robustness") or (
            relation == "invariance" and case.name == cls.smoke[0]
        )

    @classmethod
    def _resized(cls, case: Case) -> Case:
        return case.resized({name: min(size, cls.interpreted.get(name, size)) for name, size in case.sizes.items()})

    def test_relation(self, backend: str, relation: str, dtype: str, case: Case) -> None:
        """Rules 3 to 9 and the tolerance contract."""
        relation_cell = cell(self.operator, case, dtype, backend)
        records = list(check_relation(relation_cell, relation))
        checks = [record for record in records if isinstance(record, Check)]
        assert not [f"{check.item}: {check.comparison.message}" for check in checks if not check.passed]
        reasons = [record.reason for record in records if isinstance(record, Skip)]
        assert checks or reasons
        if not checks:
            pytest.skip("; ".join(reasons))

    @pytest.mark.gpu
    def test_hundred_runs_beside_another_stream(self, backend: str, large_case: Case) -> None:
        """Rule 6 at sizes that fill the GPU: the order of blocks and other work change no bit."""
        counts = differing_runs(self._large(backend, large_case), 100)
        assert counts == dict.fromkeys(counts, 0)

    @pytest.mark.gpu
    def test_large_calls_follow_no_batch(self, backend: str, large_case: Case) -> None:
        """Rule 7 between small calls and calls that fill the GPU, whose work is split in other ways."""
        records = check_relation(self._large(backend, large_case), "invariance")
        checks = [record for record in records if isinstance(record, Check)]
        assert checks
        assert not [f"{check.item}: {check.comparison.message}" for check in checks if not check.passed]

    def _large(self, backend: str, case: Case) -> Cell:
        reason = self.operator.backend(backend).why_not(call_of(self.operator, setting_of("bf16")))
        if reason is not None:
            pytest.skip(reason)
        return cell(self.operator, case, "bf16", backend)

    def test_planted_bugs_replace_a_text_that_stands_once(self) -> None:
        """The text that a planted bug replaces occurs exactly once, also for bugs that are planted only on a GPU."""
        bugs = [(mutants, bug) for mutants in self.planted for bug in mutants.bugs]
        assert not [bug for mutants, bug in bugs if places(mutants.modules, bug) != 1]

    def test_planted_bug_is_caught(self, mutants: Mutants, bug: Bug) -> None:
        """The quick cases catch each bug that is planted in a copy of a backend."""
        assert _baseline(self.operator, mutants.backend, mutants.cases).planted(mutants.modules, bug)

    def test_negative_control_is_caught(self, catching: str, control: str) -> None:
        """The quick cases catch each negative control, by the relation that is meant for it."""
        baseline = _baseline(self.operator, AUTO)
        call = CONTROLS[catching][control](baseline.candidate.call, spec_of(self.operator))
        if call is None:
            pytest.skip("does not apply to this operator")
        assert baseline.modified(call, catching)

    def test_the_canary_is_repeatable_and_whole(self) -> None:
        """The canary's bits differ between dtypes and repeat in every run; each record has forward, at least."""
        if not self.operator.canary:
            pytest.skip("it has no canary")
        runs = [_bits(self.operator, "native", device()) for _ in range(2)]
        assert runs[0] == runs[1]
        digests = [digest for by_pass in runs[0].values() for digest in by_pass.values()]
        assert len(set(digests)) == len(digests) == len(canary.BITS) * len(canary.PASSES)
        for arch, backends in canary.records_of(self.operator.canary).items():
            assert arch.startswith(("sm", "gfx"))
            for backend, dtypes in backends.items():
                self.operator.backend(backend)
                assert all({"forward"} <= by_pass.keys() <= set(canary.PASSES) for by_pass in dtypes.values())

    @pytest.mark.gpu
    def test_the_canary_has_the_recorded_bits(self) -> None:
        """Rule 6 over time: this GPU, its driver and the compilers give the bits that they gave when recorded."""
        has = self.operator.canary
        record = canary.records_of(self.operator.canary).get(arch_of("cuda")) if has else None
        if record is None:
            pytest.skip("nothing is recorded for this architecture")
        for backend, dtypes in record.items():
            found = _bits(self.operator, backend, device())
            assert found.keys() == dtypes.keys()
            for dtype, by_pass in dtypes.items():
                assert {name: found[dtype][name] for name in by_pass} == by_pass, (backend, dtype)


def _bits(operator: Operator, backend: str, device: torch.device) -> dict[str, dict[str, str]]:
    """Return the canary's digests of a backend, by dtype and pass; dtypes that it does not support are missing."""
    digests = {}
    for dtype in canary.BITS:
        with contextlib.suppress(BackendUnavailable):
            name = next(name for name, other in DTYPES.items() if other == dtype)
            digests[name] = canary.measured(operator, backend, dtype, device)
    return digests


def _accelerated(operator: Operator) -> list[str]:
    """Return the backends with kernels of their own, or all backends if there are none."""
    names = [backend.name for backend in operator.backends]
    return [name for name in names if name != "native"] or names


def _runs_interpreted(backend: str) -> bool:
    """Return whether a backend's kernels run in Triton's interpreter, whose BF16 differs from a GPU's."""
    return backend == "triton" and device().type == "cpu"


def _is_checked_interpreted(spec: Spec, planted: Sequence[Mutants], case: Case, relation: str, dtype: str) -> bool:
    """Return whether a case runs in Triton's interpreter; a GPU runs all cases.

    All that is checked there runs on the first case, and but for ``torch`` on the cases that catch the planted bugs.
    The others run in FP32, and check their outputs or their gradients; of generated ones half of the small.
    """
    is_first = case.name == spec.first_of(case.function).name
    shown = {name for mutants in planted if mutants.backend == "triton" for name in mutants.cases}
    if relation == "torch" or is_first:
        return is_first
    if case.name in shown and not case.relations:
        return True
    of_relation, left_out = divmod(zlib.crc32(case.name.encode()) % 4, 2)
    its_relation = of_relation == (relation == "gradients") or not case.grad
    sizes = list(case.sizes.values())
    is_small = math.prod(sizes) <= SMALL and max(sizes[:-1], default=0) <= SHORT
    return (
        dtype == "fp32"
        and relation not in ("hygiene", "parity")
        and (its_relation or relation not in ("accuracy", "gradients"))
        and (not case.relations or (is_small and not left_out))
    )


def _backends_with_all_promises(operator: Operator) -> list[str]:
    """Return the backends that run here and make all promises: a broken promise shows only there."""
    return [name for name in runnable(operator) if operator.backend(name).promises[device().type] == INVARIANT]


def _baseline(operator: Operator, backend: str, names: Sequence[str] = ()) -> Baseline:
    spec = spec_of(operator)
    cases = [case for case in spec.cases if (case.name in names if names else case.suite == "quick" and fits(case))]
    candidate = backend_candidate(operator, backend, backend, device().type)
    return Baseline(candidate, [Cell(candidate, spec, case, setting_of()) for case in cases])
