"""DetLinear: an nn.Linear in everything but its bits."""

import copy
import pickle

import pytest
import torch
from torch import nn

from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import DetLinear, det_gemm_dw, det_linear


def test_constructor_initialisation_and_state_dict_are_those_of_nn_linear():
    torch.manual_seed(0)
    plain = nn.Linear(12, 7, bias=True, dtype=torch.bfloat16)
    torch.manual_seed(0)
    layer = DetLinear(12, 7, bias=True, dtype=torch.bfloat16)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in layer.state_dict().items())
    assert DetLinear(12, 7, bias=False).load_state_dict(nn.Linear(12, 7, bias=False).state_dict())
    assert isinstance(layer, nn.Linear)


@pytest.mark.parametrize("bias", [True, False])
def test_from_linear_shares_the_parameters(bias):
    plain = nn.Linear(12, 7, bias=bias, dtype=torch.bfloat16).eval().requires_grad_(False)
    plain.weight.main_grad = torch.zeros(7, 12)
    layer = DetLinear.from_linear(plain)
    assert layer.weight is plain.weight
    assert layer.bias is plain.bias
    assert layer.weight.main_grad is plain.weight.main_grad
    assert (layer.in_features, layer.out_features, layer.training) == (12, 7, False)
    assert DetLinear.from_linear(plain.train()).training


def test_hooks_of_the_module_stay_there():
    plain, calls = nn.Linear(3, 2), []
    plain.register_forward_hook(lambda *_: calls.append(1))
    DetLinear.from_linear(plain)(torch.ones(1, 3))
    assert not calls


def test_from_linear_refuses_what_it_cannot_share():
    with pytest.raises(TypeError, match=r"module: expected an nn\.Linear, got Conv1d"):
        DetLinear.from_linear(nn.Conv1d(1, 1, 1))
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    with pytest.raises(TypeError, match="module: expected a weight that is a parameter"):
        DetLinear.from_linear(parametrized)


def test_deepcopy_and_pickle():
    layer, x = DetLinear(12, 7), Draw(torch.float32).normal(3, 12)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is DetLinear
        assert twin.weight is not layer.weight
        assert torch.equal(twin(x), layer(x))


def test_trains_as_nn_linear_does():
    draw = Draw(torch.float32, seed=8)
    x, target = draw.normal(40, 6), draw.normal(40, 3, scale=0.1)
    target = target + x @ draw.normal(6, 3)
    torch.manual_seed(0)
    plain = nn.Linear(6, 3)
    layer = copy.deepcopy(DetLinear.from_linear(plain))
    losses = {}
    for model in (plain, layer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[model] = []
        for _ in range(30):
            loss = nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[model].append(float(loss.detach()))
    assert losses[layer][-1] < 0.05 * losses[layer][0]
    torch.testing.assert_close(losses[layer], losses[plain], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(layer.weight, plain.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.bias, plain.bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_is_continued_and_the_weight_gets_no_grad(dtype):
    draw = Draw(dtype, seed=9)
    layer = DetLinear(12, 7, dtype=dtype)
    x, upstream = draw.normal(4, 16, 12), draw.normal(4, 16, 7)
    whole = det_gemm_dw(x.view(-1, 12), upstream.view(-1, 7), out_dtype=torch.float32).t()
    for buffer in (torch.zeros(7, 12), torch.zeros(12, 7).t()):
        layer.weight.main_grad = buffer
        for tokens in (slice(1), slice(1, 4)):
            layer(x[tokens]).backward(upstream[tokens])
        assert layer.weight.main_grad is buffer
        assert torch.equal(buffer, whole)
    assert layer.weight.grad is None
    assert layer.bias.grad.dtype == dtype


def test_main_grad_of_a_frozen_weight_or_without_grad_is_left_alone():
    layer, x = DetLinear(12, 7), Draw(torch.float32).normal(3, 12).requires_grad_()
    layer.weight.main_grad = torch.full((7, 12), 5.0)
    with torch.no_grad():
        layer(x)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert bool((layer.weight.main_grad == 5).all())
    assert x.grad is not None


def test_only_gradients_that_are_asked_for_are_formed():
    """``needs_input_grad`` says which may be; the pass under way may want fewer, and main_grad is not to be touched."""
    layer, x = DetLinear(12, 7), Draw(torch.float32).normal(3, 12).requires_grad_()
    layer.weight.main_grad = torch.zeros(7, 12)
    upstream = torch.ones(3, 7)
    torch.autograd.grad(layer(x), [x, layer.bias], upstream)
    layer(x).backward(upstream, inputs=[x])
    assert not layer.weight.main_grad.any()
    torch.autograd.grad(layer(x), layer.weight, upstream, allow_unused=True)
    once = layer.weight.main_grad.clone()
    assert bool(once.all())
    layer(x).backward(upstream, inputs=[layer.weight])
    assert torch.equal(layer.weight.main_grad, 2 * once)


def test_one_weight_in_two_layers_continues_one_main_grad():
    draw = Draw(torch.float32, seed=10)
    first = DetLinear(8, 8, bias=False)
    second = DetLinear.from_linear(first)
    x, upstream = draw.normal(16, 8), draw.normal(16, 8)
    (expected,) = torch.autograd.grad(second(first(x)), first.weight, upstream)
    first.weight.main_grad = torch.zeros(8, 8)
    second(first(x)).backward(upstream)
    torch.testing.assert_close(first.weight.main_grad, expected)


def test_weight_that_an_optimizer_changed_in_between_is_noticed():
    """What is saved for backward is versioned as torch's own operators do it; main_grad alone may change."""
    layer = DetLinear(4, 4)
    loss = layer(torch.ones(1, 4, requires_grad=True)).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_forward_is_det_linear():
    layer, x = DetLinear(12, 7), Draw(torch.float32).normal(2, 3, 12)
    assert torch.equal(layer(x), det_linear(x, layer.weight, layer.bias))
