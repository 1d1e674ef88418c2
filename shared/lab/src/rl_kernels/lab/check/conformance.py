"""The tests that every operator package runs: subclass ``Conformance`` in its tests and name the operator.

    class TestConformance(Conformance):
        operator = OPERATOR

The rules are the project's rules for operators: one signature, one validator, repeatable, invariant, torch-native, no
silent fallback, global state unchanged.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch.autograd import forward_ad

from rl_kernels.core import canary
from rl_kernels.core.contract import DTYPES
from rl_kernels.core.dispatch import AUTO, BackendUnavailable, record_dispatch, use_backend
from rl_kernels.core.operator import INVARIANT, Operator, arch_of
from rl_kernels.core.registry import kernel_registry
from rl_kernels.core.testing import Case, Draw, Inputs, Spec, function_of, spec_of
from rl_kernels.core.testing.grouped import flat
from rl_kernels.core.testing.planted import Bug, Mutants, places
from rl_kernels.lab.check.candidate import backend_candidate
from rl_kernels.lab.check.cell import Cell, Setting, call_of
from rl_kernels.lab.check.compare import bits
from rl_kernels.lab.check.guard import named
from rl_kernels.lab.check.mutation import Baseline
from rl_kernels.lab.check.mutation.controls import CONTROLS
from rl_kernels.lab.check.relations import RELATIONS, check_relation
from rl_kernels.lab.check.relations.integration import Promised, RawCalls
from rl_kernels.lab.check.repeat import differing_runs
from rl_kernels.lab.check.result import Check, Skip
from rl_kernels.lab.check.run import Run

CHECKED = {"fp32": tuple(RELATIONS), "bf16": ("accuracy", "gradients", "invariance"), "fp16": ("accuracy", "gradients")}
"""Relations by dtype; the CPU computes every dtype in FP32, so bits are not checked in a third dtype."""
SMALL, SHORT = 5000, 40
"""Largest product of the sizes, and largest size (except the last), of generated cases in Triton's interpreter."""


def device() -> torch.device:
    """Return the device that the tests run on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cell(operator: Operator, case: Case, dtype: str = "fp32", backend: str = "auto") -> Cell:
    """Return a backend on a case."""
    candidate = backend_candidate(operator, backend, backend, device().type)
    return Cell(candidate, spec_of(operator), case, _setting(dtype))


class Conformance:
    """Checks the rules for ``operator``, on every backend that runs here and every quick case."""

    operator: ClassVar[Operator]
    large: ClassVar[Sequence[Case]] = ()
    """Calls that fill a GPU, one for each way a backend may split its work; by default the operator's plainest case."""
    planted: ClassVar[Sequence[Mutants]] = ()
    """Bugs in its backends that the quick cases must catch."""

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Parametrize the tests by the operator's quick cases, dtypes, relations and backends."""
        spec = spec_of(cls.operator)
        cases = [case for case in spec.cases if case.suite == "quick" and _fits(case)]
        if "relation" in metafunc.fixturenames:
            starts = {bad.case or cases[0].name for bad in spec.illegal}
            names = [
                pytest.param(backend, relation, dtype, case, id=f"{backend}-{relation}-{dtype}-{case.name}")
                for backend in _runnable(cls.operator)
                for dtype, relations in CHECKED.items()
                if not (_runs_interpreted(backend) and dtype == "bf16")
                for relation in relations
                for case in cases
                if not _runs_interpreted(backend) or _is_checked_interpreted(spec, cls.planted, case, relation, dtype)
                if not case.relations or relation in case.relations
                # A case with its own dtype is the same in every run.
                if not case.dtype or dtype == next(iter(CHECKED))
                if relation != "robustness" or case.name in starts
                if relation != "parity" or len(_runnable(cls.operator)) > 1
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

    def test_fake_kernels_promise_the_results(self, quick_case: Case) -> None:
        """Rule 9: shapes, strides and dtypes of the raw ops' results, with all options."""
        for dtype in ("fp32", "bf16"):
            case_cell = cell(self.operator, quick_case, dtype, "native")
            with Promised() as raw:
                run = case_cell.run()
                run.results(case_cell.upstream(run))
            assert not raw.differing

    def test_an_error_names_the_wrong_tensor(self, quick_case: Case) -> None:
        """Rule 1: what is no tensor, or one that is elsewhere, has another dtype or one dim more is refused by name."""
        function, inputs = function_of(self.operator, quick_case.function), _inputs(self.operator, quick_case)
        first = next(iter(inspect.signature(self.operator.function(quick_case.function)).parameters))
        for name, value in [(name, value) for name, value in inputs.items() if isinstance(value, torch.Tensor)]:
            # The others are compared with the first.
            others = [] if name == first else [value.to("meta"), value[None]]
            for wrong in (value.to(torch.complex64), object(), *others):
                with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
                    function(**{**inputs, name: wrong})

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
        reason = self.operator.backend(backend).why_not(call_of(self.operator, _setting("bf16")))
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

    def test_inductor(self) -> None:
        """Rule 9, for the first call under the default compiler."""
        spec = spec_of(self.operator)
        case = spec.case()
        torch.compiler.reset()
        compiled = flat(torch.compile(self.operator.function(), fullgraph=True), spec.groups)
        # At its first use the compiler writes environment variables, which a checked call may not, so call it before.
        compiled(**_inputs(self.operator, case))
        _check_bits(self.operator, case, _run(self.operator, case, compiled))

    def test_double_backward_raises(self) -> None:
        """Rule 9: a second derivative is refused, not silently zero."""
        spec = spec_of(self.operator)
        inputs = _inputs(self.operator, spec.case())
        leaf = inputs[spec.differentiable[0]].requires_grad_()
        result = next(iter(named(function_of(self.operator)(**inputs), spec.output).values()))
        (grad,) = torch.autograd.grad(result.double().square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            grad.double().square().sum().backward()

    def test_forward_mode_of_a_gradient_raises(self) -> None:
        """Rule 9: so is forward-mode AD through a backward pass, also one that adds to ``main_grad``."""
        spec = spec_of(self.operator)
        for name in (spec.differentiable[0], *sorted(spec.main_grad)):
            case = next(case for case in spec.cases if name in _inputs(self.operator, case))
            inputs = _inputs(self.operator, case)
            leaf = inputs[name].requires_grad_()
            if name in spec.main_grad:
                leaf.main_grad = torch.zeros(leaf.shape, device=leaf.device)
            result = next(iter(named(function_of(self.operator, case.function)(**inputs), spec.output).values()))
            with forward_ad.dual_level():
                upstream = forward_ad.make_dual(torch.ones_like(result), torch.ones_like(result))
                with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
                    torch.autograd.grad(result, leaf, upstream, allow_unused=True)

    def test_nothing_is_done_for_a_gradient_without_grad_mode(self, quick_case: Case) -> None:
        """Rule 9: under ``no_grad`` the raw ops are those of operands that require no gradient."""
        spec, function = spec_of(self.operator), function_of(self.operator, quick_case.function)
        called = []
        for needs_gradient in (False, True):
            inputs = _inputs(self.operator, quick_case)
            for name in spec.differentiable:
                if name in inputs:
                    inputs[name].requires_grad_(needs_gradient)
            with torch.no_grad(), RawCalls() as raw:
                function(**inputs)
            called.append([*raw.calls])
        assert called[0] == called[1]

    def test_main_grad_of_a_weight_whose_gradient_is_not_asked_for(self) -> None:
        """Rule 9: it stays as it is, whether the weight is frozen or the pass is for another gradient."""
        spec = spec_of(self.operator)
        for name in sorted(spec.main_grad):
            case = next(case for case in spec.cases if name in _inputs(self.operator, case))
            for is_frozen in (True, False):
                inputs = _inputs(self.operator, case)
                other = next(key for key in spec.differentiable if key != name and key in inputs)
                weight, leaf = inputs[name].requires_grad_(not is_frozen), inputs[other].requires_grad_()
                weight.main_grad = torch.zeros(weight.shape, device=weight.device)
                results = named(function_of(self.operator, case.function)(**inputs), spec.output)
                (grad,) = torch.autograd.grad(next(iter(results.values())).sum(), leaf)
                assert grad.any()
                assert not weight.main_grad.any()

    def test_import_is_quiet_and_light(self) -> None:
        """Rule 11: importing the package prints nothing and imports no GPU library."""
        code = (
            # PyTorch itself imports a part of cuda.bindings, if that is installed.
            "import sys, torch; before = set(sys.modules)\n"
            f"import {self.operator.package}, {self.operator.spec}\n"
            "heavy = {'triton', 'cuda', 'cuda.core', 'cuda.bindings.nvrtc'} & sys.modules.keys() - before\n"
            "assert not heavy, heavy\n"
            "assert not torch.cuda.is_initialized()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_every_option_is_exercised(self) -> None:
        """Rule 1 and the checker: each optional argument takes a non-default value in some case."""
        spec = spec_of(self.operator)
        for function in {case.function for case in spec.cases}:
            values_of: dict[str, list[Any]] = {}
            for case in (case for case in spec.cases if case.function == function and _fits(case)):
                for name, value in _inputs(self.operator, case).items():
                    values_of.setdefault(name, []).append(value)
            for name, parameter in _options(self.operator, function):
                values = values_of.get(name, [])
                assert any(_differs(value, parameter.default) for value in values), f"{function or 'main'}: {name}"

    def test_a_plain_implementation_is_checked(self) -> None:
        """The checker: the plainest call has no option about how to compute, which a user's implementation lacks."""
        spec = spec_of(self.operator)
        for function in {case.function for case in spec.cases}:
            arguments = _inputs(self.operator, spec.first_of(function)).keys()
            assert not arguments & spec.unread - spec.spared, function or "main"

    def test_reference_has_the_signature(self) -> None:
        """Rule 1: the definition takes the operator's arguments, in order, by name, with equal defaults."""
        spec = spec_of(self.operator)
        for function, reference in spec.references.items():
            public = inspect.signature(function_of(self.operator, function)).parameters
            expected = [name for name in public if name not in spec.unread]
            parameters = inspect.signature(reference).parameters.values()
            names = [parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
            # A definition with **kwargs names only the options that it reads itself.
            assert [name for name in expected if name in names] == names
            assert len(names) < len(parameters) or names == expected

    def test_forcing_and_record(self) -> None:
        """Rule 10: an explicit backend runs or raises; the backend that ran is recorded."""
        case = spec_of(self.operator).case()
        for backend in self.operator.backends:
            call = partial(function_of(self.operator), **_inputs(self.operator, case))
            with use_backend(**{self.operator.name: backend.name}), record_dispatch() as log:
                if backend.name in _runnable(self.operator):
                    call()
                    assert {choice.backend for choice in log} == {backend.name}
                else:
                    with pytest.raises(BackendUnavailable, match=backend.name):
                        call()
                    assert not log

    def test_the_canary_is_repeatable_and_whole(self) -> None:
        """The canary's bits differ between dtypes and repeat in every run; records have all dtypes of each backend."""
        if not self.operator.canary:
            pytest.skip("it has no canary")
        runs = [_bits(self.operator, "native", device()) for _ in range(2)]
        assert runs[0] == runs[1]
        digests = [digest for by_pass in runs[0].values() for digest in by_pass.values()]
        assert len(set(digests)) == len(digests) == len(canary.BITS) * len(canary.PASSES)
        for arch, backends in canary.records_of(self.operator.package).items():
            assert arch.startswith(("sm", "gfx"))
            for backend, dtypes in backends.items():
                self.operator.backend(backend)
                assert all(sorted(by_pass) == sorted(canary.PASSES) for by_pass in dtypes.values())

    @pytest.mark.gpu
    def test_the_canary_has_the_recorded_bits(self) -> None:
        """Rule 6 over time: this GPU, its driver and the compilers give the bits that they gave when recorded."""
        has = self.operator.canary
        record = canary.records_of(self.operator.package).get(arch_of("cuda")) if has else None
        if record is None:
            pytest.skip("nothing is recorded for this architecture")
        assert {name: _bits(self.operator, name, device()) for name in record} == record

    def test_registry(self) -> None:
        """The registry returns the operator's function by name and alias, and the package's other functions by name."""
        for name in (self.operator.name, *self.operator.aliases):
            assert kernel_registry.get_op(name) is self.operator.function()
        package = importlib.import_module(self.operator.package)
        functions = {name: getattr(package, name) for name in package.__all__}
        functions = {name: value for name, value in functions.items() if inspect.isfunction(value)}
        public = {
            name
            for name, value in functions.items()
            if {"backend", "options"} & inspect.signature(value).parameters.keys()
        }
        assert public == {self.operator.name, *self.operator.functions}
        assert all(kernel_registry.get_op(name) is functions[name] for name in self.operator.functions)


def _bits(operator: Operator, backend: str, device: torch.device) -> dict[str, dict[str, str]]:
    """Return the canary's digests of a backend, by dtype and pass; dtypes that it does not support are missing."""
    digests = {}
    for dtype in canary.BITS:
        with contextlib.suppress(BackendUnavailable):
            name = next(name for name, other in DTYPES.items() if other == dtype)
            digests[name] = canary.measured(operator, backend, dtype, device)
    return digests


def _fits(case: Case) -> bool:
    return device().type == "cuda" or not case.gpu


def _setting(dtype: str = "fp32") -> Setting:
    return Setting(dtype, device(), arch_of(device().type), suite="quick")


def _runnable(operator: Operator) -> list[str]:
    call = call_of(operator, _setting())
    return [backend.name for backend in operator.backends if backend.why_not(call) is None]


def _accelerated(operator: Operator) -> list[str]:
    """Return the backends with kernels of their own, or all backends if there are none."""
    names = [backend.name for backend in operator.backends]
    return [name for name in names if name != "native"] or names


def _runs_interpreted(backend: str) -> bool:
    """Return whether a backend's kernels run in Triton's interpreter, whose BF16 differs from a GPU's."""
    return backend == "triton" and device().type == "cpu"


def _is_checked_interpreted(spec: Spec, planted: Sequence[Mutants], case: Case, relation: str, dtype: str) -> bool:
    """Return whether a case runs in Triton's interpreter; a GPU runs all cases.

    Hygiene and parity run on the first case and on the cases that catch the planted bugs. In FP16 a case with gradients
    checks either its outputs or its gradients. A generated case checks one of the two, in one dtype.
    """
    if relation == "torch":
        return case.name == spec.first_of(case.function).name
    if relation in ("hygiene", "parity"):
        shown = {name for mutants in planted if mutants.backend == "triton" for name in mutants.cases}
        return case.name in shown or case.name == spec.first_of(case.function).name
    of_relation, of_dtype = divmod(zlib.crc32(case.name.encode()) % 4, 2)
    its_relation = of_relation == (relation == "gradients") or not case.grad
    if not case.relations:
        return its_relation or dtype != "fp16" or relation not in ("accuracy", "gradients")
    sizes = list(case.sizes.values())
    is_small = math.prod(sizes) <= SMALL and max(sizes[:-1], default=0) <= SHORT
    return is_small and its_relation and of_dtype == (dtype == "fp16")


def _backends_with_all_promises(operator: Operator) -> list[str]:
    """Return the backends that run here and make all promises: a broken promise shows only there."""
    return [name for name in _runnable(operator) if operator.backend(name).promises[device().type] == INVARIANT]


def _baseline(operator: Operator, backend: str, names: Sequence[str] = ()) -> Baseline:
    spec = spec_of(operator)
    cases = [case for case in spec.cases if (case.name in names if names else case.suite == "quick" and _fits(case))]
    candidate = backend_candidate(operator, backend, backend, device().type)
    return Baseline(candidate, [Cell(candidate, spec, case, _setting()) for case in cases])


def _inputs(operator: Operator, case: Case) -> Inputs:
    spec: Spec = spec_of(operator)
    return spec.inputs(case, Draw(DTYPES["fp32"], device(), seed=7))


def _run(operator: Operator, case: Case, function: Callable[..., Any] | None = None) -> Run:
    call = function or function_of(operator, case.function)
    spec = spec_of(operator)
    inputs = _inputs(operator, case)
    leaves = spec.differentiable if case.grad and not spec.writes.keys() & inputs.keys() else []
    return Run(lambda kwargs: call(**kwargs), spec.output, inputs, leaves)


def _check_bits(operator: Operator, case: Case, compiled: Run) -> None:
    eager = _run(operator, case)
    upstream = cell(operator, case).upstream(eager)
    expected, results = eager.results(upstream), compiled.results(upstream)
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        comparison = bits(results[name], value)
        assert comparison.passed, f"{name}: {comparison.message}"


def _options(operator: Operator, function: str) -> Iterator[tuple[str, inspect.Parameter]]:
    for name, parameter in inspect.signature(function_of(operator, function)).parameters.items():
        if parameter.default is not inspect.Parameter.empty and name not in spec_of(operator).uncased:
            yield name, parameter


def _differs(value: Any, default: Any) -> bool:
    return isinstance(value, torch.Tensor) or value != default
