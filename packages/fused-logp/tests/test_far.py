"""Logits far from 0, where differences lose their digits and sums of exponents overflow, and far apart in memory."""

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.fused_logp import fused_logp
from rl_kernels.fused_logp.op import OPERATOR
from rl_kernels.fused_logp.reference import fused_logp as reference

INF = float("inf")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")
CALL = Call.of(torch.zeros(1, device=DEVICE), V=3)
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
ROWS = {
    "a tie at the top": [3e38, 3e38, -3e38],
    "beside a masked entry": [3e38, 3e38, -INF],
    "all at the bottom": [-3e38, -3e38, -3e38],
    "one alone": [3e38, 1e38, 0.0],
    "a reference without fractions": [1e10, 0.0, 1e10],
    "differences of 1": [1e6, 1e6 - 1, 1e6 + 0.5],
    "both ends": [1e6, 1e6 + 0.0625, -1e6],
}


def results(function, logits, outputs, **options):
    """Return the statistics and the gradient of the sum of some of them, in FP64."""
    logits = logits.detach().requires_grad_()
    ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    stats = function(logits, ids, return_stats=True, **options)
    sum((getattr(stats, name).sum() for name in outputs), 0.0).backward()
    return [value.detach().double() for value in (*stats, logits.grad)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outputs", [("logp",), ("logp", "entropy")], ids=" ".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_large_logits_keep_the_digits_of_their_differences(temperature, dtype, outputs, backend):
    rows = torch.tensor(list(ROWS.values()), device=DEVICE).to(dtype)
    found = results(fused_logp, rows, outputs, temperature=temperature, backend=backend)
    expected = results(reference, rows.double(), outputs, temperature=temperature)
    # An ULP of the gradient: the interpreter cuts BF16 off.
    rounding = 2.0**-23 if dtype == torch.float32 else 2.0**-7
    for value, gold in zip(found, expected, strict=True):
        # FP32 holds no larger numbers.
        torch.testing.assert_close(value, gold.float().double(), rtol=1e-6 + rounding, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_a_large_logsumexp_is_the_softmax(backend):
    # Autograd of the definition subtracts the logsumexp, which is too coarse here even in FP64.
    rows = torch.tensor(list(ROWS.values()), device=DEVICE)
    *_, grad = results(fused_logp, rows, ("logsumexp",), backend=backend)
    torch.testing.assert_close(grad, rows.double().softmax(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_in_other_segments(backend):
    row = torch.full((5, 70_000), -3e38, device=DEVICE)
    row[0, ::9000] = 3e38
    row[1, 65_000:] = 2e38
    row[2, 30_000], row[2, 40_000] = -1e10, 1e10
    row[3, :8192], row[3, 8192] = -INF, 3e38
    row[4] = 0.0
    row[4, 60_000] = -3e38
    for value, gold in zip(
        results(fused_logp, row, ("logp", "entropy"), backend=backend),
        results(reference, row.double(), ("logp", "entropy")),
        strict=True,
    ):
        torch.testing.assert_close(value, gold.float().double(), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_entropy_keeps_its_digits_at_an_offset(backend):
    torch.manual_seed(0)
    # Multiples of 1/16 are exact at 1e6, so that nothing but the arithmetic loses digits.
    near = torch.randint(-160, 160, (4, 1000), device=DEVICE) / 16
    options = {"temperature": 0.7, "backend": backend}
    found = results(fused_logp, near + 1e6, ("logp", "entropy"), **options)
    plain = results(fused_logp, near, ("logp", "entropy"), **options)
    for i in (0, 2, 3):
        torch.testing.assert_close(found[i], plain[i], rtol=1e-6, atol=2e-6)
