"""No rounding takes a log-probability above 0 or an entropy below 0, whichever way they are formed."""

from __future__ import annotations

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.linear_logp import linear_logits, linear_logp
from rl_kernels.linear_logp.op import OPERATOR
from rl_kernels.linear_logp.reference import linear_logp as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RUNS = [
    (backend.name, dtype)
    for backend in OPERATOR.backends
    for dtype in DTYPES
    if backend.why_not(Call.of(torch.zeros(1, device=DEVICE, dtype=dtype), D=8, V=7, bias=True)) is None
]
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
ROWS = 70


@pytest.mark.parametrize(("backend", "dtype"), RUNS, ids=str)
def test_bounds_of_near_certain_rows(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Small integers, so that logits are exact and only the softmax rounds.
    hidden, weight = (torch.randint(-8, 9, (n, 8), device=DEVICE).to(dtype) for n in (ROWS, 7))
    hidden *= 2.0 ** torch.randint(5, (ROWS, 1), device=DEVICE).to(dtype)
    bias = torch.randint(-4, 5, (7,), device=DEVICE).to(dtype)
    ids = (hidden.double() @ weight.double().T + bias.double()).argmax(1)
    hidden[0] = torch.nan
    temperatures = torch.tensor(0.7, device=DEVICE), torch.logspace(-6, 1, ROWS, device=DEVICE)
    for given in {}, {"logit_scale": 0.3, "softcap": 30.0}, *({"temperature": value} for value in temperatures):
        stats = linear_logp(hidden, weight, ids, bias, return_stats=True, backend=backend, **given)
        gold = reference(hidden.double(), weight.double(), ids, bias.double(), return_stats=True, **given)
        for sign, value, expected in ((-1, stats.logp, gold.logp), (1, stats.entropy, gold.entropy)):
            assert value.isnan().nonzero().tolist() == [[0]]
            assert (sign * value[1:]).min() >= 0
            # Caps form logits of about 30 in FP32.
            torch.testing.assert_close(value, expected.float(), rtol=1e-4, atol=1e-4, equal_nan=True)
    found = linear_logits(hidden, weight, bias, backend=backend).logp(ids)
    assert torch.equal(found[1:], linear_logp(hidden, weight, ids, bias, backend=backend)[1:])
    assert found[0].isnan()
