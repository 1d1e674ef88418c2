"""Logits far from 0, where differences lose their digits and sums of exponents overflow, and far apart in memory."""

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing.storage import lying
from rl_kernels.linear_logp import linear_logp
from rl_kernels.linear_logp.op import OPERATOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 8
ROWS = {
    "a tie at the top": [3e38, 3e38, -3e38],
    "all at the bottom": [-3e38, -3e38, -3e38],
    "a reference without fractions": [1e10, 0.0, 1e10],
    "differences of 1": [1e6, 1e6 - 1, 1e6 + 0.5],
    "both ends": [1e6, 1e6 + 0.0625, -1e6],
}


CALL = Call.of(torch.zeros(1, device=DEVICE), D=SIZE, V=3, bias=True)
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_far_from_0_keep_the_digits_of_their_differences(temperature, row, backend):
    # The logits are the bias, whose gradient is theirs.
    hidden, weight = torch.zeros(1, SIZE, device=DEVICE), torch.zeros(3, SIZE, device=DEVICE)
    bias = torch.tensor(ROWS[row], device=DEVICE, requires_grad=True)
    ids = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    stats = linear_logp(hidden, weight, ids, bias, temperature=temperature, return_stats=True, backend=backend)
    (stats.logp + 0.5 * stats.entropy).sum().backward()
    z = (bias.detach().double() / temperature).requires_grad_()
    logs = z.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum()
    (logs[0] + 0.5 * entropy).backward()
    near = {"rtol": 1e-6, "atol": 2e-6}
    torch.testing.assert_close(stats.logp[0], logs[0].float(), **near)
    torch.testing.assert_close(stats.entropy[0], entropy.float(), **near)
    torch.testing.assert_close(bias.grad * temperature, z.grad.float(), **near)


HALF = Call.of(torch.zeros(1, device=DEVICE, dtype=torch.bfloat16), D=SIZE, V=3, bias=True)


@pytest.mark.parametrize("backend", [backend.name for backend in OPERATOR.backends if backend.why_not(HALF) is None])
def test_a_tie_of_bf16_at_the_top(backend):
    hidden, weight = (torch.zeros(n, SIZE, device=DEVICE, dtype=torch.bfloat16) for n in (1, 3))
    bias = torch.tensor([3e38, 3e38, -3e38], device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    stats = linear_logp(hidden, weight, ids, bias, return_stats=True, backend=backend)
    stats.logp.sum().backward()
    assert stats.entropy.tolist() == pytest.approx([0.6931472])
    assert bias.grad.tolist() == [0.5, -0.5, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("far", ["hidden", "lm_head_weight", "rows of lm_head_weight"])
def test_elements_beyond_an_offset_of_32_bits(far, backend):
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 16, device=DEVICE).half(), torch.randn(40, 16, device=DEVICE).half() / 4
    ids = torch.tensor([0, 39, 17], device=DEVICE)

    def call(hidden, weight):
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        linear_logp(*leaves, ids, backend=backend).sum().backward()
        return [leaf.grad for leaf in leaves]

    moved = {
        "hidden": lambda: (lying(hidden, "far"), weight),
        "lm_head_weight": lambda: (hidden, lying(weight, "far")),
        "rows of lm_head_weight": lambda: (hidden, lying(weight.T, "far").T),
    }
    for found, expected in zip(call(*moved[far]()), call(hidden, weight), strict=True):
        assert torch.equal(found, expected)
