"""The Triton backend of fused_logp: schedules that follow the rows change no bit, offsets are 64 bits wide."""

import pytest
import torch

from rl_kernels.core.calls import forget
from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw
from rl_kernels.fused_logp import fused_logp
from rl_kernels.fused_logp.op import OPERATOR
from rl_kernels.lab.check.compare import bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REASON = OPERATOR.backend("triton").why_not(Call.of(torch.zeros(1, device=DEVICE)))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def statistics(logits, ids):
    return fused_logp(logits, ids, temperature=0.7, return_stats=True, backend="triton")


@pytest.mark.parametrize("vocab", [2 * 8192, 2 * 8192 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_whole_rows_and_segments_give_the_same_bits(vocab, dtype, monkeypatch):
    from rl_kernels.fused_logp.backends.triton import backend as triton_backend

    draw = Draw(dtype, DEVICE, seed=5)
    logits, ids = draw.normal(5, vocab, scale=3.0), draw.ids(vocab, 5)
    found = []
    for limit in (0, 1000):
        monkeypatch.setattr(triton_backend, "SPLIT_BELOW", limit)
        forget()
        found.append(statistics(logits, ids))
    forget()
    if dtype == torch.float32:
        expected = fused_logp(logits, ids, temperature=0.7, return_stats=True, backend="native")
        for whole, native in zip(found[0], expected, strict=True):
            torch.testing.assert_close(whole, native)
    for whole, split in zip(*found, strict=True):
        assert bits(split, whole).passed


def test_dense_gradient_is_fully_written():
    draw = Draw(torch.float32, DEVICE, seed=6)
    for vocab in (1, 15, 16, 17, 4095, 4097):
        logits, ids = draw.normal(3, vocab).requires_grad_(), draw.ids(vocab, 3)
        (dense,) = torch.autograd.grad(fused_logp(logits, ids, backend="triton").sum(), logits)
        wide = torch.full((3, vocab + 1), torch.nan, device=DEVICE)[:, 1:].copy_(logits.detach()).requires_grad_()
        (other,) = torch.autograd.grad(fused_logp(wide, ids, backend="triton").sum(), wide)
        assert bits(other, dense).passed


def test_temperature_without_dims_on_the_device():
    draw, found = Draw(torch.float32, DEVICE, seed=8), []
    logits, ids = draw.normal(20, 50).requires_grad_(), draw.ids(50, 20)
    for value in (0.7, torch.tensor(0.7, device=DEVICE)):
        logp = fused_logp(logits, ids, temperature=value, backend="triton")
        found.append((logp, *torch.autograd.grad(logp.sum(), logits)))
    assert all(bits(a, b).passed for a, b in zip(*found, strict=True))
