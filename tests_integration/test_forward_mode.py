"""Forward-mode AD and gradients through vmap, which no operator has, raise: none is lost without a word."""

import pytest
import torch
from torch.autograd import forward_ad

from rl_kernels.core import kernel_registry
from rl_kernels.core.testing import Draw, function_of, spec_of
from rl_kernels.fused_logp import fused_logp

REFUSED = r"forward-mode AD is not supported"
VMAPPED = r"gradients through vmap are not supported"


def calls():
    """Yield operator, case and argument: each floating tensor of each public function once."""
    for name in kernel_registry.names():
        operator, met = kernel_registry.load(name), set()
        spec = spec_of(operator)
        for case in spec.cases:
            if case.suite != "quick" or case.gpu or "out" in case.options:
                continue
            for argument, value in spec.inputs(case, Draw(torch.float32)).items():
                key = (case.function or name, argument)
                if isinstance(value, torch.Tensor) and value.is_floating_point() and key not in met:
                    met.add(key)
                    yield pytest.param(operator, case, argument, id="-".join((*key, case.name)))


CALLS = list(calls())
LEAVES = [call for call in CALLS if call.values[1].grad and call.values[2] in spec_of(call.values[0]).differentiable]


def prepared(operator, case, argument):
    """Return the tensor that an argument is, and the call as a function of it."""
    inputs = spec_of(operator).inputs(case, Draw(torch.float32))
    return inputs[argument], lambda x: function_of(operator, case.function)(**{**inputs, argument: x})


def test_every_public_function_is_here():
    functions = {f"{call.values[0].name} {call.values[1].function}".strip() for call in CALLS}
    assert functions >= {
        *("fused_logp", "linear_logp", "det_gemm", "det_gemm det_linear", "det_gemm det_gemm_dw"),
        *("grpo_loss", "grpo_loss grpo_loss_from_advantages", "grpo_loss group_advantages"),
    }
    assert {"old_logps", "ref_logps", "rewards", "temperature", "bias"} <= {call.values[2] for call in CALLS}


def dual(call, x):
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, torch.ones_like(x)))


def dual_of_a_leaf(call, x):
    dual(call, x.requires_grad_())


def dual_upstream(call, x):
    result = tensors(call(x.requires_grad_()))[0]
    upstream = torch.ones_like(result)
    with forward_ad.dual_level():
        torch.autograd.grad(result, x, forward_ad.make_dual(upstream, upstream))


def jvp(call, x):
    torch.func.jvp(call, (x,), (torch.ones_like(x),))


def jacfwd(call, x):
    torch.func.jacfwd(call)(x)


def vmapped(call, x):
    jvp(lambda y: torch.func.vmap(lambda _: call(y))(torch.zeros(2)), x)


@pytest.mark.parametrize(("operator", "case", "argument"), CALLS)
@pytest.mark.parametrize("transform", [dual, jvp, jacfwd, vmapped])
def test_a_tangent_is_refused(operator, case, argument, transform):
    x, call = prepared(operator, case, argument)
    with pytest.raises(RuntimeError, match=f"{case.function or operator.name}: {REFUSED}"):
        transform(call, x)


@pytest.mark.parametrize(("operator", "case", "argument"), CALLS)
def test_without_a_tangent_a_level_changes_nothing(operator, case, argument):
    x, call = prepared(operator, case, argument)
    expected = call(x)
    with forward_ad.dual_level():
        found = call(x)
    assert repr(found) == repr(expected)


def test_a_tangent_is_refused_where_it_is_compiled():
    logits, ids = torch.randn(3, 9), torch.zeros(3, dtype=torch.long)
    compiled = torch.compile(lambda x: fused_logp(x, ids), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits), fused_logp(logits, ids))
    with pytest.raises(Exception, match=f"fused_logp: {REFUSED}"):
        dual(compiled, logits)
    assert torch.equal(compiled(logits), fused_logp(logits, ids))


@pytest.mark.parametrize(("operator", "case", "argument"), CALLS)
def test_vmap_is_right_or_raises(operator, case, argument):
    x, call = prepared(operator, case, argument)
    # With other values in the second call, and a mask still of 0 and 1.
    both = torch.stack([x, x.flip(0)])
    expected = [tensors(call(one.clone())) for one in both]
    try:
        found = tensors(torch.func.vmap(call)(both))
    except (RuntimeError, ValueError):
        return
    for index, results in enumerate(expected):
        for one, other in zip(found, results, strict=True):
            # A row of which thresholds keep nothing is NaN.
            torch.testing.assert_close(one[index], other, rtol=0, atol=0, equal_nan=True)


def total(call):
    return lambda x: sum(value.sum() for value in tensors(call(x)))


GRADIENTS = {
    "a tangent on a leaf": (dual_of_a_leaf, REFUSED),
    "a tangent of the upstream gradient": (dual_upstream, REFUSED),
    "grad": (lambda call, x: torch.func.grad(total(call))(x), r"gradients through torch\.func\.grad are not supported"),
    "vmap": (lambda call, x: torch.func.vmap(call)(torch.stack([x, x])), VMAPPED),
    "vmap twice": (lambda call, x: torch.func.vmap(torch.func.vmap(call))(torch.stack([x, x])[None]), VMAPPED),
    "vmap closed over": (lambda call, x: torch.func.vmap(lambda _: tensors(call(x)))(torch.zeros(2)), VMAPPED),
    "grad in vmap": (lambda call, x: torch.func.vmap(torch.func.grad(total(call)))(torch.stack([x, x])), VMAPPED),
}


@pytest.mark.parametrize(("operator", "case", "argument"), LEAVES)
@pytest.mark.parametrize("what", GRADIENTS)
def test_gradients_in_other_ways_are_refused(operator, case, argument, what):
    (x, call), (transform, message) = prepared(operator, case, argument), GRADIENTS[what]
    name = f"{case.function or operator.name}: " if message != REFUSED else ""
    with pytest.raises(RuntimeError, match=name + message):
        transform(call, x.requires_grad_(what != "grad"))


@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_without_gradients_is_right(compiled):
    logits, ids = torch.randn(2, 3, 9, requires_grad=True), torch.zeros(3, dtype=torch.long)
    mapped = torch.func.vmap(lambda x: fused_logp(x, ids))
    if compiled:
        mapped = torch.compile(mapped, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(mapped(logits), torch.stack([fused_logp(x, ids) for x in logits]))
    with pytest.raises(Exception, match=f"fused_logp: {VMAPPED}"):
        mapped(logits)


def test_upstream_gradients_may_be_batched():
    logits, ids = torch.randn(3, 9, requires_grad=True), torch.zeros(3, dtype=torch.long)
    result = fused_logp(logits, ids)
    (found,) = torch.autograd.grad(result, logits, torch.eye(3), is_grads_batched=True, retain_graph=True)
    for one, upstream in zip(found, torch.eye(3), strict=True):
        assert torch.equal(one, torch.autograd.grad(result, logits, upstream, retain_graph=True)[0])


def tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [value for part in result for value in tensors(part)]
