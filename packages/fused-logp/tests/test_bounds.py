"""No rounding takes a log-probability above 0 or an entropy below 0; the gradient keeps its digits."""

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.fused_logp import fused_logp
from rl_kernels.fused_logp.op import OPERATOR
from rl_kernels.fused_logp.reference import fused_logp as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALL = Call.of(torch.zeros(1, device=DEVICE), V=3)
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
ROWS = 24


def near_certain(vocab, dtype, gap, offset):
    """Return logits whose largest one leads by ``gap`` on average, masked entries among the others, and its column."""
    torch.manual_seed(vocab)
    logits = torch.randn(ROWS, vocab, device=DEVICE)
    ids = torch.randint(vocab, (ROWS,), device=DEVICE)
    logits[logits > 2] = -torch.inf
    logits[torch.arange(ROWS), ids] = gap * (0.5 + torch.rand(ROWS, device=DEVICE)) + 2
    # Sizes at which the exponents' reference is rounded in every place.
    return (logits + offset * torch.rand(ROWS, 1, device=DEVICE)).to(dtype), ids


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bounds_of_near_certain_rows(dtype, backend):
    temperatures = torch.logspace(-6, 1, ROWS, device=DEVICE)
    one = torch.tensor(0.7, device=DEVICE)
    for vocab, gap, offset, scale in ((5, 12.0, 3e4, one), (5, 1e4, 0.0, temperatures), (1100, 30.0, 300.0, 1.0)):
        logits, ids = near_certain(vocab, dtype, gap, offset)
        ids[0], logits[1], logits[2, 0], logits[3, ids[3]] = -100, -torch.inf, torch.nan, torch.finfo(dtype).max
        given = {"temperature": scale, "ignore_index": -100, "return_stats": True}
        found = fused_logp(logits, ids, out_dtype=torch.float32, backend=backend, **given)
        expected = reference(logits.double(), ids, **given)
        for name, sign in (("logp", -1), ("entropy", 1)):
            value, gold = getattr(found, name), getattr(expected, name).float()
            assert value.isnan().nonzero().flatten().tolist() == [1, 2], name
            assert (sign * value.nan_to_num()).min() >= 0, name
            torch.testing.assert_close(value, gold, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert not torch.log(-torch.expm1(found.logp[3:])).isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_a_near_certain_row_keeps_its_digits(backend):
    logits, ids = near_certain(5, torch.float32, 24.0, 0.0)
    entropy = fused_logp(logits.requires_grad_(), ids, return_stats=True, backend=backend).entropy
    (found,) = torch.autograd.grad(entropy.sum(), logits)
    log_p = logits.detach().double().log_softmax(-1)
    surprise = log_p.exp() * log_p.clamp(min=-1e9)
    expected = log_p.exp() * surprise.sum(-1, keepdim=True) - surprise
    # An entropy of 0 beside a log-probability that is not would be off by 6e-8.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=3e-9)
