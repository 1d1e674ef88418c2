"""Logits far from 0, where differences lose their digits and sums of exponents overflow, and far apart in memory."""

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import far
from rl_kernels.linear_logp import linear_logp
from rl_kernels.linear_logp.op import OPERATOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")
SIZE = 8
ROWS = {
    "a tie at the top": [3e38, 3e38, -3e38],
    "all at the bottom": [-3e38, -3e38, -3e38],
    "a reference without fractions": [1e10, 0.0, 1e10],
    "differences of 1": [1e6, 1e6 - 1, 1e6 + 0.5],
    "both ends": [1e6, 1e6 + 0.0625, -1e6],
}


def backends(dtype):
    call = Call.of(torch.zeros(1, device=DEVICE, dtype=dtype), D=SIZE, V=3, bias=True)
    return [backend.name for backend in OPERATOR.backends if backend.why_not(call) is None]


BACKENDS, OF_HALF = backends(torch.float32), backends(torch.bfloat16)


def of_logits(row, dtype, **options):
    """Return the statistics, and the logits with the gradient of ``logp + entropy / 2``: they are the bias."""
    hidden, weight = (torch.zeros(n, SIZE, device=DEVICE, dtype=dtype) for n in (1, 3))
    bias = torch.tensor(row, device=DEVICE, dtype=dtype, requires_grad=True)
    ids = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    stats = linear_logp(hidden, weight, ids, bias, return_stats=True, **options)
    (stats.logp + 0.5 * stats.entropy).sum().backward()
    return stats, bias


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_far_from_0_keep_the_digits_of_their_differences(temperature, backend):
    for row in ROWS.values():
        stats, bias = of_logits(row, torch.float32, temperature=temperature, backend=backend)
        z = (bias.detach().double() / temperature).requires_grad_()
        logs = z.log_softmax(-1)
        entropy = -(logs.exp() * logs).sum()
        (logs[0] + 0.5 * entropy).backward()
        near = {"rtol": 1e-6, "atol": 2e-6}
        torch.testing.assert_close(stats.logp[0], logs[0].float(), **near)
        torch.testing.assert_close(stats.entropy[0], entropy.float(), **near)
        torch.testing.assert_close(bias.grad * temperature, z.grad.float(), **near)


@pytest.mark.parametrize("backend", OF_HALF)
def test_a_tie_of_bf16_at_the_top(backend):
    stats, bias = of_logits(ROWS["a tie at the top"], torch.bfloat16, backend=backend)
    assert stats.entropy.tolist() == pytest.approx([0.6931472])
    assert bias.grad.tolist() == [0.5, -0.5, 0.0]


NAMES = ("hidden", "lm_head_weight", "bias", "temperature", "grad_logp", "grad_entropy", "main_grad")


def everything(backend, hidden, weight, bias, temperature, grad_logp, grad_entropy, main_grad):
    """Return statistics, gradients, and the weight's gradient in a buffer."""
    ids = torch.zeros(len(hidden), dtype=torch.int64, device=DEVICE)
    leaves = [x.detach().requires_grad_() for x in (hidden, weight, bias)]
    leaves[1].main_grad = main_grad
    stats = linear_logp(*leaves[:2], ids, leaves[2], temperature=temperature, return_stats=True, backend=backend)
    torch.autograd.backward([stats.logp, stats.entropy], [grad_logp, grad_entropy])
    return [*(x.detach() for x in stats), leaves[0].grad, leaves[2].grad, main_grad.clone()]


@pytest.mark.parametrize("sizes", [(2, 2, 8), (3, 40, 24)], ids=["a stride", "an index times a stride"])
@pytest.mark.parametrize("backend", OF_HALF)
def test_elements_beyond_an_offset_of_32_bits(backend, sizes):
    torch.manual_seed(0)
    count, vocab, size = sizes
    operands = [torch.randn(*shape, device=DEVICE).half() for shape in ((count, size), (vocab, size), (vocab,))]
    operands += [*torch.rand(3, count, device=DEVICE) + 0.5, torch.ones(vocab, size, device=DEVICE)]
    expected = everything(backend, *(x.clone() for x in operands))
    for place, name in enumerate(NAMES):
        for dim in range(operands[place].ndim):
            moved = [far(x, dim) if at == place else x.clone() for at, x in enumerate(operands)]
            assert all(map(torch.equal, everything(backend, *moved), expected)), f"{name}, dim {dim}"


@pytest.mark.skipif("triton" not in BACKENDS, reason="needs a GPU, or Triton's interpreter")
def test_states_of_a_billion_rows_in_triton():
    from rl_kernels.linear_logp.backends.triton import kernels

    states = far(torch.rand(3, 32, device=DEVICE), 0)
    found = far(torch.zeros(3, 32, device=DEVICE), 0)
    flags = {"PER_ROW": False, "ENTROPY": True, "num_warps": 1}
    kernels.merge_blocks[(1, 1)](states, found, 1.0, states.stride(0), 1, **flags)
    assert torch.equal(found, states)
