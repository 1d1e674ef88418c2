"""The tolerance contract and the operators fit: every comparison that the checker can make has a row."""

import pytest
import torch

from rl_kernels.core import kernel_registry
from rl_kernels.core.check.candidate import named
from rl_kernels.core.contract import DIRECTIONS, DTYPES, RELATIONS, contract
from rl_kernels.core.testing import Draw, spec_of

OPERATORS = kernel_registry.names()


def test_all_operators_are_here():
    assert {"det_gemm", "fused_logp", "grpo_loss", "linear_logp"} <= set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_class_has_every_row(name):
    for op_class in set(spec_of(kernel_registry.load(name)).classes.values()):
        for relation in RELATIONS:
            for dtype in DTYPES:
                for direction in DIRECTIONS:
                    for arch in contract().archs:
                        contract().tolerance(relation, op_class, dtype, direction, arch)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_result_has_a_class(name):
    operator = kernel_registry.load(name)
    spec = spec_of(operator)
    for case in spec.cases:
        if case.suite == "full":
            continue
        inputs = spec.inputs(case, Draw(torch.float32))
        results = named(operator.function(case.function)(**inputs), spec.output)
        gradients = {f"gradient:{argument}" for argument in spec.differentiable if argument in inputs}
        assert results.keys() | gradients <= spec.classes.keys(), case.name


@pytest.mark.parametrize("name", OPERATORS)
def test_names_are_unique(name):
    spec = spec_of(kernel_registry.load(name))
    for names in ([case.name for case in spec.cases], [call.name for call in spec.illegal]):
        assert len(names) == len(set(names)) > 0


@pytest.mark.parametrize("name", OPERATORS)
def test_backends_promise_something_everywhere_they_run(name):
    for backend in kernel_registry.load(name).backends:
        assert backend.promises
        assert all("repeatable" in promises for promises in backend.promises.values())
