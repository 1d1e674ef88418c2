"""batch_invariant_ops: gradients through the ops in the mode and of the functions without it, and errors."""

import pytest
import torch
from torch import nn

import rl_kernels.models.clients.batch_invariant_ops as batch_invariant_ops
from rl_kernels.core.testing import Draw

F32, F64, HALF = torch.ones(3, 3), torch.ones(3, 3).double(), torch.ones(3, 3).half()
BAD = {
    "mat2: expected dtype": lambda: F32 @ F64,
    "mat2: expected 3 rows": lambda: F32 @ F32[:2],
    "input: expected dtype .* got torch.complex64": lambda: F32.cfloat() @ F32.cfloat(),
    "input: expected 2 dims": lambda: torch.mm(F32[0], F32),
    "mat2: expected 2 matrices": lambda: torch.bmm(F32.expand(2, 3, 3), F32.expand(1, 3, 3)),
    "mat2: expected 1 matrices": lambda: torch.bmm(F32[None], F32.expand(2, 3, 3)),
    "input: expected a shape that broadcasts": lambda: torch.addmm(F32[:2], F32, F32),
    r"input: expected a shape .* got \(1, 3, 3\)": lambda: torch.addmm(F32[None], F32, F32),
    "input: expected dtype torch.float32": lambda: torch.addmm(F64, F32, F32),
    "mat1: expected dtype": lambda: torch.addmm(F32, F32.long(), F32.long()),
    "input: expected shape": lambda: torch.ones(3).addmm_(F32, F32),
    "out: expected shape": lambda: torch.mm(F32, F32, out=torch.ones(2)),
    "out: expected dtype": lambda: torch.mm(F32, F32, out=torch.ones(3, 3).double()),
    "out_dtype: ": lambda: torch.mm(F64, F64, out_dtype=torch.float32),
    "alpha: expected a real number": lambda: torch.addmm(F32, F32, F32, alpha=1j),
    "b: expected a tensor": lambda: batch_invariant_ops.bmm_batch_invariant(HALF[None], None),
    "dtype: expected a torch.dtype": lambda: batch_invariant_ops.mean_dim(F32, 0, dtype="half"),
    "dim: expected a dim from -2 to 1": lambda: F32.mean(2),
    "dim: expected each dim once": lambda: F32.mean((0, -2)),
    "input: expected a floating dtype": lambda: torch.arange(3).mean(0),
    "dtype: expected a floating": lambda: F32.mean(0, dtype=torch.int64),
    "input: expected dtype .* got torch.int64": lambda: torch.arange(3).log_softmax(0),
    "input: .* with half_to_float": lambda: torch._log_softmax(F32, 0, True),
    "input: forward-mode AD": lambda: torch.func.jvp(lambda x: x @ x, (F32,), (F32,)),
    "input: forward-mode AD is not": lambda: torch.func.jvp(lambda x: torch.bmm(x, x), (F32[None],), (F32[None],)),
    "bias: expected 1 dims": lambda: batch_invariant_ops.matmul_persistent(F32, F32, F32),
    "a: expected dtype": lambda: batch_invariant_ops.matmul_persistent(F64, F64),
    "b: expected shape": lambda: batch_invariant_ops.matmul_persistent(F32, F32[:2]),
    "out: expected dtype float16": lambda: batch_invariant_ops.bmm_batch_invariant(HALF[None], HALF[None], out=F32),
    r"out: expected shape \(1, 3, 3\)": lambda: batch_invariant_ops.bmm_batch_invariant(
        F32[None], F32[None], out=torch.ones(2, 3, 3)
    ),
}


@pytest.mark.smoke
def test_what_cannot_be_computed_raises_and_names_the_argument():
    for message, call in BAD.items():
        by_name = "batch_invariant_ops" in call.__code__.co_names
        # PyTorch's own ops raise what they raise without the mode.
        kinds = (TypeError, ValueError) if by_name else (RuntimeError, IndexError)
        with batch_invariant_ops.set_batch_invariant_mode(), pytest.raises(kinds, match=f"^{message}"):
            call()


def draw(*shape, seed=0):
    return Draw(torch.float32, seed=seed).normal(*shape)


@pytest.mark.smoke
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
    with batch_invariant_ops.set_batch_invariant_mode():
        found = torch.autograd.grad(loss(layer, x, up), (x, layer.bias, layer.weight))
        rows = x.detach().requires_grad_()
        (layer(rows).log_softmax(-1) * up).sum().backward()
        alone = x[4:5].detach().requires_grad_()
        (layer(alone).log_softmax(-1) * up[4:5]).sum().backward()
    assert torch.equal(alone.grad[0], rows.grad[4])
    for mine, theirs in zip(found, (exact.grad, twin.bias.grad, twin.weight.grad), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-5, atol=2e-5)
    with batch_invariant_ops.set_batch_invariant_mode():
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
