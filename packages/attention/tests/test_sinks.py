"""Sinks that are not finite: -inf is no sink at all, also for queries that see no key; others spoil their own head."""

import pytest
import torch

from rl_kernels.attention import det_attention, reference
from rl_kernels.attention.op import OPERATOR
from rl_kernels.core.testing import Draw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")
CALL = OPERATOR.describe(torch.zeros(1, 1, 1, 16, device=DEVICE).half())
BACKENDS = ["reference", *(backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None)]
INF = float("inf")
SINKS = (-INF, 0.5, -INF, -2.0)
QUERIES, KEYS = 5, (3, 0, 6)
"""Of each sequence; the first two queries of the first one see no key."""
LOW = -1e30
"""Takes the place of -inf where this would give NaN: the limit of ever lower sinks."""


def call(backend, q, k, v, **options):
    if backend == "reference":
        return reference.det_attention(q, k, v, causal=True, return_lse=True, **options)
    return det_attention(q, k, v, causal=True, return_lse=True, backend=backend, **options)


def operands(dtype=torch.float16):
    """Return q, k and v of each sequence, one after the other."""
    draw = Draw(dtype, DEVICE, seed=5)
    return [draw.normal(*shape, 16) for shape in ((len(KEYS) * QUERIES, 4), (sum(KEYS), 2), (sum(KEYS), 2))]


def laid(layout, q, k, v):
    """Return operands and integers of a layout."""
    if layout == "packed":
        starts = [torch.tensor(at, device=DEVICE) for at in ((0, 5, 10, 15), (0, 3, 3, 9))]
        return q, k, v, dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
    q, capacity = q.unflatten(0, (len(KEYS), QUERIES)), 6 if layout == "left" else 16
    rooms = [x.new_full((len(KEYS), capacity, *x.shape[1:]), 7.0) for x in (k, v)]
    for x, room in zip((k, v), rooms, strict=True):
        for place, part in enumerate(x.split(KEYS)):
            first = capacity - len(part) if layout == "left" else 0
            room[place, first : first + len(part)] = part
    used = torch.tensor(KEYS, device=DEVICE)
    if layout == "left":
        return q, *rooms, {"k_start": capacity - used}
    table = {"block_table": torch.tensor([[0], [1], [2]], device=DEVICE)} if layout == "paged" else {}
    return q, *rooms, {"seqused_k": used, **table}


def plain(q, k, v, sinks, left, softcap):
    """Return output and lse of each sequence, by PyTorch's softmax over its keys and the sink."""
    found = []
    for queries, keys, values in zip(q.split(QUERIES), k.split(KEYS), v.split(KEYS), strict=True):
        ahead = torch.arange(len(keys), device=DEVICE) - torch.arange(QUERIES, device=DEVICE)[:, None]
        ahead -= len(keys) - QUERIES
        score = torch.einsum("thd,shd->hts", queries, keys.repeat_interleave(2, 1)) / 4
        score = softcap * (score / softcap).tanh() if softcap else score
        score = score.masked_fill((ahead > 0) | (ahead < -left), -INF)
        score = torch.cat((score, sinks[:, None, None].expand(-1, QUERIES, 1)), -1)
        weights = score.softmax(-1)[..., :-1]
        found.append((torch.einsum("hts,shd->thd", weights, values.repeat_interleave(2, 1)), score.logsumexp(-1).T))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize(("left", "softcap"), [(100, 0.0), (2, 2.0)], ids=["plain", "window and cap"])
@pytest.mark.parametrize("layout", ["packed", "left", "cache", "paged"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_minus_inf_is_no_sink(backend, layout, left, softcap):
    found = [x.requires_grad_(layout in ("packed", "left")) for x in (*operands(), torch.tensor(SINKS, device=DEVICE))]
    exact = [x.detach().double().requires_grad_() for x in found]
    exact[3] = exact[3].detach().clamp(min=LOW).requires_grad_()
    q, k, v, where = laid(layout, *found[:3])
    out, lse = call(backend, q, k, v, sinks=found[3], softcap=softcap, window=(left, 0), **where)
    out, lse = out.reshape(-1, 4, 16), lse.mT.reshape(-1, 4)
    expected, exact_lse = plain(*exact, left, softcap)
    near = {"atol": 4e-3, "rtol": 4e-3, "check_dtype": False}
    torch.testing.assert_close(out, expected, **near)
    torch.testing.assert_close(lse, exact_lse.masked_fill(exact_lse < LOW / 2, -INF), **near)
    assert lse.isneginf().any()
    if found[0].requires_grad:
        upstream = Draw(torch.float16, DEVICE, seed=6).normal(*out.shape)
        grads = torch.autograd.grad(out, found, upstream), torch.autograd.grad(expected, exact, upstream.double())
        for name, value, wanted in zip(("q", "k", "v", "sinks"), *grads, strict=True):
            torch.testing.assert_close(value, wanted, **near, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_of_minus_inf_change_no_bit(backend):
    """One query of a long cache, whose keys are split over programs, and of an empty one."""
    draw = Draw(torch.float16, DEVICE, seed=7)
    q, k, v = draw.normal(2, 1, 4, 16), draw.normal(2, 1100, 2, 16), draw.normal(2, 1100, 2, 16)
    where = {"seqused_k": torch.tensor([1100, 0], device=DEVICE)}
    found = call(backend, q, k, v, sinks=torch.full((4,), -INF, device=DEVICE), **where)
    assert all(map(torch.equal, found, call(backend, q, k, v, **where)))


@pytest.mark.parametrize("value", [INF, float("nan")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_sinks_that_are_not_finite_spoil_their_own_head(backend, value):
    results = []
    for sink in (SINKS[1], value):
        leaves = [*operands(), torch.tensor(SINKS, device=DEVICE)]
        leaves[3][1] = sink
        leaves = [x.requires_grad_() for x in leaves]
        q, k, v, where = laid("packed", *leaves[:3])
        out, lse = call(backend, q, k, v, sinks=leaves[3], **where)
        dq, dk, dv, dsinks = torch.autograd.grad(out.sum(), leaves)
        others = [0, 2, 3]
        # Heads 0 and 1 share keys.
        results.append([out[:, others], lse[others], dq[:, others], dk[:, 1:], dv[:, 1:], dsinks[others]])
    assert all(map(torch.equal, *results))
    assert not any(x.isnan().any() for x in results[1])
