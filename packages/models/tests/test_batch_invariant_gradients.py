"""batch_invariant_ops: gradients through the ops of PyTorch in the mode, and of the functions without it."""

import torch
from torch import nn

import rl_kernels.models.clients.batch_invariant_ops as batch_invariant_ops
from rl_kernels.core.testing import Draw

set_mode = batch_invariant_ops.set_batch_invariant_mode


def draw(*shape, seed=0):
    return Draw(torch.float32, seed=seed).normal(*shape)


def test_gradients_are_those_of_fp64_and_of_a_row_alone():
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 30), draw(9, 40)
    twin, exact = nn.Linear(40, 30).double(), x.double().requires_grad_()
    twin.load_state_dict(layer.state_dict())
    up = draw(9, 30, seed=4)

    def loss(model, value, upstream):
        logp = model(value).log_softmax(-1)
        return (logp * upstream).sum() + (value @ value.t()).mean(1).sum() + (value[None] @ value.t()[None]).mean()

    loss(twin, exact, up.double()).backward()
    x.requires_grad_()
    with set_mode():
        found = torch.autograd.grad(loss(layer, x, up), (x, layer.bias, layer.weight))
        rows = x.detach().requires_grad_()
        (layer(rows).log_softmax(-1) * up).sum().backward()
        alone = x[4:5].detach().requires_grad_()
        (layer(alone).log_softmax(-1) * up[4:5]).sum().backward()
    assert torch.equal(alone.grad[0], rows.grad[4])
    for mine, theirs in zip(found, (exact.grad, twin.bias.grad, twin.weight.grad), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-5, atol=2e-5)
    with set_mode():
        inputs = [draw(3, 4).double().requires_grad_(), draw(4, 2, seed=1).double().requires_grad_()]
        assert torch.autograd.gradcheck(lambda a, b: (a @ b).log_softmax(-1).mean(0), inputs)
        assert torch.autograd.gradgradcheck(lambda a, b: torch.addmm(b[0], a, b, beta=0.5), inputs)


def test_functions_carry_gradients_without_the_mode():
    x, w, bias = (draw(*shape).requires_grad_() for shape in ((4, 6), (6, 5), (5,)))
    up = draw(4, 5, seed=3)
    (batch_invariant_ops.log_softmax(batch_invariant_ops.matmul_persistent(x, w, bias)) * up).sum().backward()
    copies = [value.detach().double().requires_grad_() for value in (x, w, bias)]
    (torch.addmm(copies[2], *copies[:2]).log_softmax(-1) * up.double()).sum().backward()
    for mine, theirs in zip((x, w, bias), copies, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)
    value = draw(4, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda a: batch_invariant_ops.log_softmax(a, 0), [value])
    (slope,) = torch.autograd.grad(batch_invariant_ops.mean_dim(x, [0, 1]), x)
    torch.testing.assert_close(slope, torch.full_like(x, 1 / 24))
