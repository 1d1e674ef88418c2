"""Values at the ends: logits far from 0, log-probabilities of near-certain rows, and elements far apart in memory."""

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import far
from rl_kernels.linear_logp import linear_logits, linear_logp
from rl_kernels.linear_logp.op import OPERATOR
from rl_kernels.linear_logp.reference import linear_logp as reference

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
def test_large_logits_keep_the_digits_of_their_differences(temperature, backend):
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
def test_bf16_tie_of_the_largest_logits(backend):
    stats, bias = of_logits(ROWS["a tie at the top"], torch.bfloat16, backend=backend)
    assert stats.entropy.tolist() == pytest.approx([0.6931472])
    assert bias.grad.tolist() == [0.5, -0.5, 0.0]


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(backend, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16) for backend in backends(dtype)],
    ids=str,
)
def test_bounds_of_near_certain_rows(backend, dtype):
    """No rounding takes a log-probability above 0 or an entropy below 0, whichever way they are computed."""
    torch.manual_seed(0)
    # Small integers, so that logits are exact and only the softmax rounds.
    hidden, weight = (torch.randint(-8, 9, (n, 8), device=DEVICE).to(dtype) for n in (70, 7))
    hidden *= 2.0 ** torch.randint(5, (70, 1), device=DEVICE).to(dtype)
    bias = torch.randint(-4, 5, (7,), device=DEVICE).to(dtype)
    ids = (hidden.double() @ weight.double().T + bias.double()).argmax(1)
    hidden[0] = torch.nan
    temperatures = torch.tensor(0.7, device=DEVICE), torch.logspace(-6, 1, 70, device=DEVICE)
    for arguments in {}, {"logit_scale": 0.3, "softcap": 30.0}, *({"temperature": value} for value in temperatures):
        stats = linear_logp(hidden, weight, ids, bias, return_stats=True, backend=backend, **arguments)
        gold = reference(hidden.double(), weight.double(), ids, bias.double(), return_stats=True, **arguments)
        for sign, value, expected in ((-1, stats.logp, gold.logp), (1, stats.entropy, gold.entropy)):
            assert value.isnan().nonzero().tolist() == [[0]]
            assert (sign * value[1:]).min() >= 0
            # Caps form logits of about 30 in FP32.
            torch.testing.assert_close(value, expected.float(), rtol=1e-4, atol=1e-4, equal_nan=True)
    result = linear_logits(hidden, weight, bias, backend=backend).logp(ids)
    assert torch.equal(result[1:], linear_logp(hidden, weight, ids, bias, backend=backend)[1:])
    assert result[0].isnan()


@pytest.mark.skipif("triton" not in BACKENDS, reason="needs a GPU, or Triton's interpreter")
def test_states_of_a_billion_rows_in_triton():
    from rl_kernels.linear_logp.backends.triton import kernels

    states = far(torch.rand(3, 32, device=DEVICE), 0)
    result = far(torch.zeros(3, 32, device=DEVICE), 0)
    flags = {"PER_ROW": False, "ENTROPY": True, "num_warps": 1}
    kernels.merge_blocks[(1, 1)](states, result, 1.0, states.stride(0), 1, **flags)
    assert torch.equal(result, states)
