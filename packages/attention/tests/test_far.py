"""Operands that are far apart in memory: an offset of 32 bits does not reach them."""

import importlib

import pytest
import torch

from rl_kernels.attention import det_attention
from rl_kernels.attention.op import OPERATOR
from rl_kernels.core.calls import forget
from rl_kernels.core.testing import Draw, far

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")
CALL = OPERATOR.describe(torch.zeros(1, 1, 1, 8, device=DEVICE).half())
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
# In the interpreter the loads of boxes are Triton's own Python.
WAYS = {name: ["pointers"] + ["boxes"] * (DEVICE == "cuda" and name == "triton") for name in BACKENDS}
LOADS = [(name, way) for name, ways in WAYS.items() for way in ways]


@pytest.fixture
def draw():
    return Draw(torch.float16, DEVICE, seed=3)


@pytest.fixture
def loads(request, monkeypatch):
    """How the Triton backend loads keys and rows: by pointers, or by TMA where it can."""
    if request.getfixturevalue("backend") != "triton":
        yield
        return
    plan = importlib.import_module("rl_kernels.attention.backends.triton.plan")
    monkeypatch.setattr(plan, "SMALL", 0)
    if request.param == "pointers":
        monkeypatch.setattr(plan, "box_of", lambda *layout: None)
    forget()
    yield
    forget()


def results(backend, q, k, v, upstream, **where):
    """Return the output and, unless keys are in a cache, the gradients of the operands."""
    needs_grad = "seqused_k" not in where
    leaves = [x.detach().requires_grad_(needs_grad) for x in (q, k, v)]
    out = det_attention(*leaves, **where, causal=True, backend=backend)
    return [out.detach(), *(torch.autograd.grad(out, leaves, upstream) if needs_grad else ())]


# Sequences, rows of each and key heads. A stride is 2^31 where there are two of them, and 2^30 where there are three.
@pytest.mark.parametrize("sizes", [(2, 3, 2), (3, 2, 3)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("backend", "loads"), LOADS, indirect=["loads"])
def test_sequences_rows_and_heads(backend, loads, packed, sizes, draw):
    batch, rows, heads = sizes
    shapes = [(*(() if packed else (batch,)), rows, count, 16) for count in (2 * heads, heads, heads, 2 * heads)]
    operands, where = [draw.normal(*shape) for shape in shapes], {}
    if packed:
        where = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 1, rows], device=DEVICE))
    expected = results(backend, *operands, **where)
    for dim in range(3 - packed):
        found = results(backend, *(far(x, dim) for x in operands), **where)
        for name, value, wanted in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
            assert torch.equal(value, wanted), f"{name}, dim {dim}"


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize(("backend", "loads"), LOADS, indirect=["loads"])
def test_pages_and_their_rows(backend, loads, size, draw):
    operands = [draw.normal(*shape, 16) for shape in ((3, 2, 2), (3, size, 2), (3, size, 2))]
    where = {"block_table": torch.tensor([[2], [0], [1]]), "seqused_k": torch.tensor([size, size - 1, 9])}
    where = {name: value.to(DEVICE) for name, value in where.items()}
    q, k, v = operands
    (expected,) = results(backend, q, k, v, None, **where)
    for dim in range(3):
        # Row 64 of a page, where a block of keys may begin, then has an offset of 2^31.
        (found,) = results(backend, q, far(k, dim, 1 << 32), far(v, dim, 1 << 32), None, **where)
        assert torch.equal(found, expected), f"dim {dim}"
