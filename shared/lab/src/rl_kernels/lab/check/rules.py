"""The single rules that an operator must keep, a test each: signature, gradients, compilers, registry."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch.autograd import forward_ad

from rl_kernels.core import dispatch
from rl_kernels.core.contract import DTYPES
from rl_kernels.core.dispatch import BackendUnavailable, record_dispatch, use_backend
from rl_kernels.core.operator import Backend, Call, Operator, arch_of
from rl_kernels.core.registry import kernel_registry
from rl_kernels.core.testing import Case, Draw, Inputs, Spec, function_of, spec_of
from rl_kernels.core.testing.grouped import flat
from rl_kernels.lab.check.candidate import backend_candidate
from rl_kernels.lab.check.cell import Cell, Setting, call_of
from rl_kernels.lab.check.compare import bits
from rl_kernels.lab.check.guard import named
from rl_kernels.lab.check.relations.integration import Promised, RawCalls
from rl_kernels.lab.check.run import Run


def device() -> torch.device:
    """Return the device that the tests run on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cell(operator: Operator, case: Case, dtype: str = "fp32", backend: str = "auto") -> Cell:
    """Return a backend on a case."""
    candidate = backend_candidate(operator, backend, backend, device().type)
    return Cell(candidate, spec_of(operator), case, setting_of(dtype))


class Rules:
    """Checks the rules for ``operator`` that are no relation of the checker; ``quick_case`` is a quick case of it."""

    operator: ClassVar[Operator]

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
        function, inputs = function_of(self.operator, quick_case.function), inputs_of(self.operator, quick_case)
        first = next(iter(inspect.signature(self.operator.function(quick_case.function)).parameters))
        for name, value in [(name, value) for name, value in inputs.items() if isinstance(value, torch.Tensor)]:
            # The others are compared with the first.
            others = [] if name == first else [value.to("meta"), value[None]]
            for wrong in (value.to(torch.complex64), object(), *others):
                with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
                    function(**{**inputs, name: wrong})

    def test_inductor(self) -> None:
        """Rule 9, for the first call under the default compiler."""
        spec = spec_of(self.operator)
        case = spec.case()
        torch.compiler.reset()
        compiled = flat(torch.compile(self.operator.function(), fullgraph=True), spec.groups)
        # At its first use the compiler writes environment variables, which a checked call may not, so call it before.
        compiled(**inputs_of(self.operator, case))
        _check_bits(self.operator, case, run_of(self.operator, case, compiled))

    def test_double_backward_raises(self) -> None:
        """Rule 9: a second derivative is refused, not silently zero."""
        spec = spec_of(self.operator)
        inputs = inputs_of(self.operator, spec.case())
        leaf = inputs[spec.differentiable[0]].requires_grad_()
        result = next(iter(named(function_of(self.operator)(**inputs), spec.output).values()))
        (grad,) = torch.autograd.grad(result.double().square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            grad.double().square().sum().backward()

    def test_forward_mode_of_a_gradient_raises(self) -> None:
        """Rule 9: so is forward-mode AD through a backward pass, also one that adds to ``main_grad``."""
        spec = spec_of(self.operator)
        for name in (spec.differentiable[0], *sorted(spec.main_grad)):
            case = next(case for case in spec.cases if name in inputs_of(self.operator, case))
            inputs = inputs_of(self.operator, case)
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
            inputs = inputs_of(self.operator, quick_case)
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
            case = next(case for case in spec.cases if name in inputs_of(self.operator, case))
            for is_frozen in (True, False):
                inputs = inputs_of(self.operator, case)
                other = next(key for key in spec.differentiable if key != name and key in inputs)
                weight, leaf = inputs[name].requires_grad_(not is_frozen), inputs[other].requires_grad_()
                weight.main_grad = torch.zeros(weight.shape, device=weight.device)
                results = named(function_of(self.operator, case.function)(**inputs), spec.output)
                (grad,) = torch.autograd.grad(next(iter(results.values())).sum(), leaf)
                assert grad.any()
                assert not weight.main_grad.any()

    def test_every_option_is_exercised(self) -> None:
        """Rule 1 and the checker: each optional argument takes a non-default value in some case."""
        spec = spec_of(self.operator)
        for function in {case.function for case in spec.cases}:
            values_of: dict[str, list[Any]] = {}
            for case in (case for case in spec.cases if case.function == function and fits(case)):
                for name, value in inputs_of(self.operator, case).items():
                    values_of.setdefault(name, []).append(value)
            for name, parameter in _options(self.operator, function):
                values = values_of.get(name, [])
                assert any(_differs(value, parameter.default) for value in values), f"{function or 'main'}: {name}"

    def test_a_plain_implementation_is_checked(self) -> None:
        """The checker: the plainest call has no option about how to compute, which a user's implementation lacks."""
        spec = spec_of(self.operator)
        for function in {case.function for case in spec.cases}:
            arguments = inputs_of(self.operator, spec.first_of(function)).keys()
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

    def test_a_call_is_described_as_explain_describes_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rule 7 and 10: the choice sees what ``describe`` returns for the same arguments, and nothing else."""
        spec, choose, seen = spec_of(self.operator), dispatch._automatic, list[Call]()

        def noted(operator: Operator, call: Call) -> Backend:
            seen.append(call)
            return choose(operator, call)

        monkeypatch.setattr(dispatch, "_automatic", noted)
        for case in spec.cases:
            if case.suite == "quick" and not case.function and not case.relations and fits(case):
                inputs = inputs_of(self.operator, case)
                seen.clear()
                with record_dispatch():
                    function_of(self.operator)(**inputs)
                assert seen
                assert {*map(repr, seen)} == {repr(self.operator.describe(**inputs))}, case.name

    def test_forcing_and_record(self) -> None:
        """Rule 10: an explicit backend runs or raises; the backend that ran is recorded."""
        case = spec_of(self.operator).case()
        for backend in self.operator.backends:
            call = partial(function_of(self.operator), **inputs_of(self.operator, case))
            with use_backend(**{self.operator.name: backend.name}), record_dispatch() as log:
                if backend.name in runnable(self.operator):
                    call()
                    assert {choice.backend for choice in log} == {backend.name}
                else:
                    with pytest.raises(BackendUnavailable, match=backend.name):
                        call()
                    assert not log

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
        operators = [kernel_registry.load(name) for name in kernel_registry.names()]
        siblings = [operator for operator in operators if operator.package == self.operator.package]
        assert public == {name for operator in siblings for name in (operator.name, *operator.functions)}
        assert all(kernel_registry.get_op(name) is functions[name] for name in self.operator.functions)


def fits(case: Case) -> bool:
    """Return whether a case can run here; some are too large for a CPU."""
    return device().type == "cuda" or not case.gpu


def setting_of(dtype: str = "fp32") -> Setting:
    """Return the setting of a dtype on this machine."""
    return Setting(dtype, device(), arch_of(device().type), suite="quick")


def runnable(operator: Operator, dtype: str = "fp32") -> list[str]:
    """Return the backends of an operator that run here."""
    call = call_of(operator, setting_of(dtype))
    return [backend.name for backend in operator.backends if backend.why_not(call) is None]


def inputs_of(operator: Operator, case: Case) -> Inputs:
    """Draw the arguments of a case in FP32."""
    spec: Spec = spec_of(operator)
    return spec.inputs(case, Draw(DTYPES["fp32"], device(), seed=7))


def run_of(operator: Operator, case: Case, function: Callable[..., Any] | None = None) -> Run:
    """Run a case, by default with the operator's function."""
    call = function or function_of(operator, case.function)
    spec = spec_of(operator)
    inputs = inputs_of(operator, case)
    leaves = spec.differentiable if case.grad and not spec.writes.keys() & inputs.keys() else []
    return Run(lambda kwargs: call(**kwargs), spec.output, inputs, leaves)


def _check_bits(operator: Operator, case: Case, compiled: Run) -> None:
    eager = run_of(operator, case)
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
