"""The Triton backend of fused_logp: schedules that follow the rows change no bit; its raw ops on any layout."""

import importlib

import pytest
import torch

from rl_kernels.core.calls import forget
from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.fused_logp import fused_logp
from rl_kernels.fused_logp.op import OPERATOR
from rl_kernels.fused_logp.spec.raw import check_against_reference
from rl_kernels.lab.check.compare import bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REASON = OPERATOR.backend("triton").why_not(Call.of(torch.zeros(1, device=DEVICE)))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="draws on the CPU; a GPU runs all cases")

PACKAGE = "rl_kernels.fused_logp"
MODULES = (f"{PACKAGE}.rows", *(f"{PACKAGE}.backends.triton.{name}" for name in ("kernels", "backend")))
BUGS = (
    Bug("upstream gradients exchanged", "contiguous() for grad in grads]", "contiguous() for grad in grads[::-1]]"),
    Bug("segments rounded down", "segments = ceil_div(vocab, kernels", "segments = max(1, vocab // kernels"),
    Bug("strided ids read as if contiguous", "target_ids.contiguous()", "target_ids"),
)
RAW = (
    dict(rows=1, vocab=1),
    dict(rows=5, vocab=4096, layout="odd", indices=True, upstream="expanded"),
    dict(rows=5, vocab=4097, layout="apart", ignored=0, scale="rows"),
    dict(rows=9, vocab=8193, layout="column", scale="apart", ids="apart", upstream="lse"),
    dict(rows=5, vocab=2 * 8192, layout=(8, 0), ignored=-100, upstream="entropy"),
    dict(rows=1, vocab=3 * 8192 + 5, layout=(3, 1), ids=torch.int32, upstream="apart", scale="rows"),
    dict(rows=3, vocab=1024, layout=(16, 1), upstream="logp", dtype=torch.float16),
    dict(rows=70, vocab=1, scale="rows"),
    dict(rows=5, vocab=8200, least="apart", layout="odd", scale="rows", ignored=0),
    dict(rows=3, vocab=700, least="rows", indices=True, upstream="expanded"),
)


def check_raw():
    for call in RAW:
        backend = importlib.import_module(MODULES[-1])
        check_against_reference({"dtype": torch.float32, "layout": "row", **call}, backend)


@interpreted
def test_raw_ops_compute_the_definition():
    check_raw()


@interpreted
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_shows_in_the_raw_ops(bug):
    with planted(MODULES, bug), pytest.raises((AssertionError, RuntimeError)):
        check_raw()


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
