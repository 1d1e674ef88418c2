"""DetLinear: an nn.Linear whose bits follow the rules of det_linear."""

import copy
import pickle

import pytest
import torch
from torch import nn

from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import DetLinear, det_linear


def test_initialization_and_state_dict_match_nn_linear():
    torch.manual_seed(0)
    plain = nn.Linear(12, 7, bias=True, dtype=torch.bfloat16)
    torch.manual_seed(0)
    layer = DetLinear(12, 7, bias=True, dtype=torch.bfloat16)
    assert isinstance(layer, nn.Linear)
    assert (layer.k_segments, layer.dx_segments, layer.join_tokens) == (1, 1, None)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in layer.state_dict().items())
    assert DetLinear(12, 7, bias=False).load_state_dict(nn.Linear(12, 7, bias=False).state_dict())


@pytest.mark.parametrize("bias", [True, False])
def test_from_linear_shares_parameters_but_no_module_hooks(bias):
    plain = nn.Linear(12, 7, bias=bias, dtype=torch.bfloat16).eval().requires_grad_(False)
    plain.weight.main_grad = torch.zeros(7, 12)
    plain.register_forward_hook(lambda *_: pytest.fail("a hook of the other module was called"))
    layer = DetLinear.from_linear(plain)
    assert layer.weight is plain.weight
    assert layer.bias is plain.bias
    assert layer.weight.main_grad is plain.weight.main_grad
    assert (layer.in_features, layer.out_features, layer.training) == (12, 7, False)
    assert DetLinear.from_linear(plain.train()).training
    x = Draw(torch.bfloat16).normal(2, 3, 12)
    assert torch.equal(layer(x), det_linear(x, plain.weight, plain.bias))


def test_a_layer_whose_class_is_changed_has_no_options():
    plain, x = nn.Linear(40, 24), Draw(torch.float32).normal(3, 40)
    shown = repr(plain)
    plain.__class__ = DetLinear
    assert repr(plain) == f"Det{shown}"
    assert torch.equal(plain(x), det_linear(x, plain.weight, plain.bias))


def test_from_linear_raises():
    with pytest.raises(TypeError, match=r"module: expected an nn\.Linear, got Conv1d"):
        DetLinear.from_linear(nn.Conv1d(1, 1, 1))
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    with pytest.raises(TypeError, match="module: expected a weight that is a parameter"):
        DetLinear.from_linear(parametrized)


def test_options_in_copies_and_repr():
    plain, x = nn.Linear(40, 24), Draw(torch.float32).normal(3, 40)
    layer = DetLinear.from_linear(plain, k_segments=8, dx_segments=2, join_tokens=64)
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is DetLinear
        assert (twin.k_segments, twin.dx_segments, twin.join_tokens) == (8, 2, 64)
        assert twin is layer or twin.weight is not layer.weight
        assert torch.equal(twin(x), det_linear(x, plain.weight, plain.bias, k_segments=8))
    shown = "DetLinear(in_features=40, out_features=24, bias=True"
    assert repr(layer) == f"{shown}, k_segments=8, dx_segments=2, join_tokens=64)"
    assert repr(DetLinear.from_linear(layer)) == f"{shown})"
    made = DetLinear(40, 24, False, dtype=torch.bfloat16, k_segments=2)
    assert (made.bias, made.weight.dtype, made.k_segments, made.dx_segments) == (None, torch.bfloat16, 2, 1)


def test_wrong_options_raise():
    bad = [("join_tokens", 24, ValueError)]
    for name in ("k_segments", "dx_segments"):
        bad += [(name, 3, ValueError), (name, 0, ValueError), (name, 2.0, TypeError), (name, True, TypeError)]
    for name, value, error in bad:
        with pytest.raises(error, match=f"{name}: expected"):
            DetLinear(4, 2, **{name: value})
        with pytest.raises(error, match=f"{name}: expected"):
            DetLinear.from_linear(nn.Linear(4, 2), **{name: value})


def test_main_grad_changes_only_with_the_weight_gradient():
    """``needs_input_grad`` says which gradients may be asked for; the running pass may want fewer."""
    layer, x = DetLinear(12, 7), Draw(torch.float32).normal(3, 12).requires_grad_()
    layer.weight.main_grad = torch.zeros(7, 12)
    upstream = torch.ones(3, 7)
    with torch.no_grad():
        layer(x)
    torch.autograd.grad(layer(x), [x, layer.bias], upstream)
    layer(x).backward(upstream, inputs=[x])
    assert not layer.weight.main_grad.any()
    torch.autograd.grad(layer(x), layer.weight, upstream, allow_unused=True)
    once = layer.weight.main_grad.clone()
    assert bool(once.all())
    layer(x).backward(upstream, inputs=[layer.weight])
    assert torch.equal(layer.weight.main_grad, 2 * once)


def test_shared_weight_has_one_main_grad():
    draw = Draw(torch.float32, seed=10)
    first = DetLinear(8, 8, bias=False)
    second = DetLinear.from_linear(first)
    x, upstream = draw.normal(16, 8), draw.normal(16, 8)
    (expected,) = torch.autograd.grad(second(first(x)), first.weight, upstream)
    first.weight.main_grad = torch.zeros(8, 8)
    second(first(x)).backward(upstream)
    torch.testing.assert_close(first.weight.main_grad, expected)
