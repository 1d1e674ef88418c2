"""A rollout in inference mode made the first call, and the arguments: no bit of the update changes.

The checker's hygiene changes the default device and dtype; here every tensor that is made names its device.
"""

import ast
import copy
from pathlib import Path

import pytest
import torch

from rl_kernels.core import kernel_registry
from rl_kernels.core.calls import forget
from rl_kernels.core.testing import Draw, function_of, spec_of
from rl_kernels.core.torchlib.scalars import _cached_numbers
from rl_kernels.lab.check.guard import named

ROOT = Path(__file__).parents[1]
CASES = [
    pytest.param(kernel_registry.load(name), case, id=f"{name}-{case.name}")
    for name in kernel_registry.names()
    for spec in [spec_of(kernel_registry.load(name))]
    for case in (*spec.cases, *spec.empty)
    if case.suite == "quick" and not case.relations
]
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "frombuffer", "full", "linspace", "logspace"),
    *("normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices"),
    *("triu_indices", "zeros"),
}
NOT_CALLED = ("testing", "check", "bench", "demo", "spec")


def run(operator, case):
    """Return a function that makes the same call every time, and returns its results and gradients.

    Its arguments are copies; ``make`` makes those that get no gradient and are not written to.
    """
    spec = spec_of(operator)
    inputs = spec.inputs(case, Draw(torch.float32))
    leaves = [name for name in spec.differentiable if case.grad and isinstance(inputs.get(name), torch.Tensor)]
    leaves = [] if spec.writes.keys() & inputs.keys() else leaves
    upstream = {}

    def call(make=copy.deepcopy):
        kept = (*leaves, *spec.writes)
        given = {name: (copy.deepcopy if name in kept else make)(value) for name, value in inputs.items()}
        # Not leaves themselves, so that a backward pass may overwrite them.
        used = {name: given[name].requires_grad_() for name in leaves}
        arguments = {**given, **{name: value * 1 for name, value in used.items()}}
        results = named(function_of(operator, case.function)(**arguments), spec.output)
        found = dict(results)
        outputs = {name: value for name, value in results.items() if value.requires_grad}
        if outputs:
            for name, value in outputs.items():
                upstream.setdefault(name, torch.linspace(-1, 1, value.numel(), dtype=value.dtype, device="cpu"))
            grads = [upstream[name].view(value.shape) for name, value in outputs.items()]
            gradients = torch.autograd.grad(list(outputs.values()), list(used.values()), grads)
            found |= {f"gradient:{name}": value for name, value in zip(used, gradients, strict=True)}
        return found

    return call


def same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert (value.device, value.dtype) == (expected[name].device, expected[name].dtype), name
        one, other = (x.detach().flatten().view(torch.uint8) for x in (value, expected[name]))
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("operator", "case"), CASES)
def test_a_rollout_in_inference_mode_changes_no_bit_of_the_update(operator, case):
    expected = run(operator, case)()
    forget()
    _cached_numbers.cache_clear()
    call = run(operator, case)

    def make(value):
        with torch.inference_mode():
            return copy.deepcopy(value)

    with torch.inference_mode():
        call()
    same_bits(call(make), expected)


def modules():
    """Return what runs when a public function is called: all but tests, commands, and what describes an operator."""
    for file in sorted([*ROOT.glob("shared/*/src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]):
        folders = file.relative_to(ROOT).parts
        if not set(NOT_CALLED) & set(folders):
            yield file


def nameless(text):
    """Return the lines of a module's source that make a tensor without saying on which device."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        makes = isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in FACTORIES
        # With ** the device may be among what it brings.
        if makes and not any(keyword.arg in ("device", None) for keyword in node.keywords):
            yield node.lineno


def test_every_tensor_that_is_made_names_its_device():
    files = list(modules())
    assert len(files) > 80
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in nameless(file.read_text("utf-8"))]
    assert found == []


def test_what_is_taken_for_making_a_tensor():
    made = "torch.zeros(3)\ntorch.tensor([1], dtype=torch.int64).to('cpu')"
    assert list(nameless(made)) == [1, 2]
    others = "torch.zeros(3, device=x.device)", "torch.zeros(3, **like)", "x.new_zeros(3)", "torch.zeros_like(x)"
    assert not any(list(nameless(text)) for text in (*others, "numpy.zeros(3)"))
