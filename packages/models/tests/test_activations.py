"""Activations of invariant() on a CPU: an element's bits do not follow its place, and values are PyTorch's."""

import pytest
import torch
from torch import nn

from rl_kernels.core.testing import Draw
from rl_kernels.models import invariant
from rl_kernels.models.clients.vllm.ops import gelu_tanh_mul, silu_mul

ACTIVATIONS = (nn.SiLU, nn.GELU, lambda: nn.GELU(approximate="tanh"), nn.Sigmoid, nn.Softplus, nn.Mish)
ACTIVATIONS += (nn.SELU, nn.ELU, nn.CELU)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations(dtype):
    values = Draw(torch.float32, seed=4).normal(4099, scale=20.0).to(dtype)
    values = torch.cat([values, torch.tensor([-1000.0, -100.0, 0.0, 100.0, 1000.0], dtype=dtype)])
    for act in ACTIVATIONS:
        made = nn.Sequential(act())
        plain = made(values)
        with invariant(made):
            found = made(values)
            pieces = [made(values[first:stop].clone()) for first, stop in ((0, 5), (5, 36), (36, 1000), (1000, 4104))]
            leaf = values.clone().requires_grad_()
            made(leaf).sum().backward()
        assert torch.equal(torch.cat(pieces), found), act
        torch.testing.assert_close(found, plain, atol=2e-6, rtol=1e-2 if dtype == torch.bfloat16 else 2e-6)
        assert bool(leaf.grad.isfinite().all()), act


def test_silu_has_first_and_second_derivatives_also_of_huge_values():
    made, values = nn.Sequential(nn.SiLU()), Draw(torch.float32, seed=5).normal(2, 500, scale=5.0)
    values[0, :3] = torch.tensor([-1e30, -200.0, 200.0])
    leaf, gold = values.requires_grad_(), values.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(nn.functional.silu(gold).sum(), gold, create_graph=True)
    with invariant(made):
        (found,) = torch.autograd.grad(made(leaf).sum(), leaf)
        (again,) = torch.autograd.grad(made(leaf).sum(), leaf, create_graph=True)
        (tail,) = torch.autograd.grad(made(leaf[0, 100:109]).sum(), leaf)
    assert torch.equal(found, again)
    assert torch.equal(found[0, 100:109], tail[0, 100:109])
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
    second = torch.autograd.grad(again[1].sum(), leaf)[0], torch.autograd.grad(expected[1].sum(), gold)[0]
    torch.testing.assert_close(second[0], second[1].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gates_have_the_bits_of_invariant(dtype):
    if dtype == torch.float32:
        gate = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 2, 1 << 16)
    else:
        gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
        gate = gate[~gate.isnan()]
    up = torch.ones_like(gate)
    for act, plugin in ((nn.SiLU(), silu_mul), (nn.GELU(approximate="tanh"), gelu_tanh_mul)):
        model = nn.Sequential(act)
        with invariant(model):
            expected = model(gate[None]) * up
        # Of -inf both make NaN.
        torch.testing.assert_close(plugin(torch.cat((gate, up))[None]), expected, rtol=0, atol=0, equal_nan=True)
