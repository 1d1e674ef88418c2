"""Calls that det_linear remembers, raw ops that observers see, and derivatives."""

import pytest
import torch

from rl_kernels.core import record_dispatch, use_backend
from rl_kernels.core.calls import forget, prepared
from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import column_parallel_linear, det_linear, row_parallel_linear
from rl_kernels.det_gemm.op import OPERATOR
from rl_kernels.lab.check.relations.integration import RawCalls


def leaves():
    draw = Draw(torch.float32)
    return [value.requires_grad_() for value in (draw.normal(2, 3, 8), draw.normal(5, 8), draw.normal(5))]


@pytest.fixture
def kinds(monkeypatch):
    """Return a list of the arguments for which ``native`` prepares its product."""
    module, found = OPERATOR.backend("native").load(), []
    native = module.forward

    def forward(*args):
        found.append(args)
        return native

    monkeypatch.setattr(module, "forward", prepared(forward))
    forget()
    yield found
    forget()


def test_each_kind_of_operands_is_prepared_once(kinds):
    x, weight, bias = (value.detach() for value in leaves())
    for rows in 2 * [x, x[:1]]:
        det_linear(rows, weight)
    # What autocast has cast is of the same kind as what came in its dtype.
    with torch.autocast("cpu", torch.bfloat16):
        det_linear(x, weight)
        det_linear(x.bfloat16(), weight.bfloat16())
    with use_backend(det_gemm="native"):
        det_linear(x, weight)
    with record_dispatch():
        det_linear(x, weight)
    found = [(a.shape, b.dtype) for a, b, *_ in kinds]
    assert found == [((2, 3, 8), torch.float32), ((1, 3, 8), torch.float32), ((2, 3, 8), torch.bfloat16)]
    expected = det_linear(x, weight, bias)
    assert torch.equal(det_linear(x.as_subclass(type("Special", (torch.Tensor,), {})), weight, bias), expected)
    assert torch.equal(torch.compile(det_linear, backend="eager")(x, weight, bias), expected)
    for place in range(3):
        operands = [torch._neg_view(-value) if at == place else value for at, value in enumerate((x, weight, bias))]
        assert torch.equal(det_linear(*operands), expected)
    assert torch.equal(det_linear(-x, weight, bias), det_linear(torch._neg_view(x), weight, bias))


def test_dispatch_mode_sees_raw_ops(kinds):
    given = leaves()
    det_linear(*given)
    with RawCalls() as raw:
        det_linear(*given).sum().backward()
        for layer, segments in ((row_parallel_linear, "k_segments"), (column_parallel_linear, "dx_segments")):
            layer(*given, **{segments: 2}).sum().backward()
    names = ("forward", "weight_gradient", "segmented")
    assert list(raw.calls) == [f"rl_kernels.det_gemm_{name}.default" for name in names]


def test_batched_gradients(kinds):
    given, upstream = leaves(), torch.randn(2, 2, 3, 5)
    batched = torch.autograd.grad(det_linear(*given), given, upstream, is_grads_batched=True)
    for place, one in enumerate(upstream):
        found = torch.autograd.grad(det_linear(*given), given, one)
        assert all(torch.equal(whole[place], part) for whole, part in zip(batched, found, strict=True))


@pytest.mark.parametrize("join_tokens", [None, 16])
def test_main_grad_has_the_gradient_and_a_new_version(join_tokens):
    given, again = leaves(), leaves()
    given[1].main_grad = torch.zeros(5, 8)
    version = given[1].main_grad._version
    for leaf in (given, again):
        det_linear(*leaf, join_tokens=join_tokens).sum().backward()
    assert given[1].grad is None
    assert torch.equal(given[1].main_grad, again[1].grad)
    assert given[1].main_grad._version > version


def test_results_may_change_in_place():
    given = leaves()
    out = det_linear(*given)
    out.mul_(2).sum().backward()
    assert torch.equal(given[2].grad, torch.full((5,), 12.0))
