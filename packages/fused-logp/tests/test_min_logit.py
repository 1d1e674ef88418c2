"""``min_logit`` gives the bits of logits that are masked where z is below it, and with -inf those of no threshold."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.testing import IGNORED, Draw, bits_of
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.fused_logp import fused_logp
from rl_kernels.fused_logp.op import OPERATOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALL = Call.of(torch.zeros(1, device=DEVICE))
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
NATIVE = "rl_kernels.core.rowwise.softmax", "rl_kernels.fused_logp.backends.native"
BUGS = (
    Bug("threshold before the temperature", "(x if temperature is None else x / temperature) <", "x <"),
    Bug("a logit at the threshold not kept", "x / temperature) < least", "x / temperature) <= least"),
    Bug("gradient of a column that is not kept", "dx.masked_fill_(below", "dx.masked_fill(below"),
    Bug("target below its threshold counts", "select(x, ids)", "select(logits[rows].to(temperature.dtype), ids)"),
)
LARGE = [pytest.param(rows, vocab, marks=pytest.mark.gpu) for rows, vocab in ((70, 50257), (2050, 40000), (3, 300000))]


def run(logits: torch.Tensor, upstream: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    result = fused_logp(leaf, return_stats=True, validate=False, **options)
    torch.autograd.backward(list(result), upstream)
    return [*(value.detach() for value in result), leaf.grad]


def check(backend: str, rows: int, vocab: int, dtype: torch.dtype) -> None:
    wide, draw = compute_dtype(dtype), Draw(dtype, DEVICE, seed=vocab)
    scales = draw.uniform(0.3, 2.0, rows, dtype=wide)
    for temperature in (1.0, 0.7, scales):
        logits, upstream = draw.normal(rows, vocab, scale=3.0), [draw.normal(rows, dtype=wide) for _ in range(3)]
        column = (
            temperature[:, None] if isinstance(temperature, torch.Tensor) else scales.new_full((rows, 1), temperature)
        )
        z = logits.to(wide) / column
        rank = draw.uniform(0, vocab, rows, dtype=torch.float64).long()
        # In its block of columns the largest logit alone is kept, at the threshold.
        rank[0] = 0
        least = z.sort(-1, descending=True).values.gather(1, rank[:, None])
        ids = torch.where(draw.mask(0.5, rows), z.argmax(-1), draw.ids(vocab, rows))
        kept = z.gather(1, ids[:, None]) >= least
        call = {"target_ids": ids, "temperature": temperature, "backend": backend}
        result = run(logits, upstream, min_logit=least[:, 0], **call)
        # The logp of a target that is not kept has no gradient.
        upstream = [torch.where(kept[:, 0], upstream[0], 0.0), *upstream[1:]]
        masked = run(logits.masked_fill(z < least, -torch.inf), upstream, **call)
        assert all(map(torch.equal, result, masked))
        assert torch.equal(result[0] == -torch.inf, ~kept[:, 0])
        assert not result[3][z < least].any()
        alone = run(
            logits[1:2],
            [value[1:2] for value in upstream],
            min_logit=least[1:2, 0],
            backend=backend,
            target_ids=ids[1:2],
            temperature=column[1:2, 0],
        )
        assert all(torch.equal(one, other[1:2]) for one, other in zip(alone, result, strict=True))
        spoiled = logits.index_fill(1, ids.new_zeros(1), torch.nan)
        assert all(value.isnan().all() for value in run(spoiled, upstream, min_logit=least[:, 0], **call))
        none = run(logits, upstream, **call)
        every = run(logits, upstream, min_logit=torch.full_like(scales, -torch.inf), **call)
        assert all(torch.equal(bits_of(one), bits_of(other)) for one, other in zip(none, every, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "vocab"), [(2, 1), (5, 70), (3, 9000), *LARGE])
def test_min_logit_is_a_mask(backend: str, rows: int, vocab: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        is_known = backend == "native" or (dtype != torch.float64 and (DEVICE == "cuda" or dtype != torch.bfloat16))
        if is_known:
            check(backend, rows, vocab, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_min_logit_on_a_gpu(backend: str) -> None:
    for (rows, vocab), dtype in itertools.product(((2, 1), (5, 70), (3, 9000)), (torch.float32, torch.bfloat16)):
        check(backend, rows, vocab, dtype)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_in_min_logit_shows(bug: Bug) -> None:
    with planted(NATIVE, bug), pytest.raises(AssertionError):
        check("native", 5, 70, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_min_logit_that_keeps_nothing(backend: str) -> None:
    logits, ids = Draw(torch.float32, DEVICE, seed=1).normal(3, 50), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    least = torch.tensor([100.0, -100.0, torch.nan], device=DEVICE)
    nan, upstream = least != -100, [torch.ones(3, device=DEVICE)] * 3
    for value in run(logits, upstream, target_ids=ids, min_logit=least, backend=backend):
        assert torch.equal(value.isnan(), nan if value.ndim == 1 else nan[:, None].expand(3, 50))
    with pytest.raises(ValueError, match="1 of 3 are below it"):
        fused_logp(logits, ids, min_logit=least.nan_to_num(-100.0), backend=backend)
    # A row of NaN is no row of which nothing is kept.
    assert fused_logp(logits * torch.nan, ids, min_logit=least.nan_to_num(0.0), backend=backend).isnan().all()
    # A NaN counts only where a row is computed.
    least, first = least.clamp(max=-100.0), torch.arange(2, device=DEVICE)
    for target_ids, rows in ((ids.index_fill(0, first[:1] + 2, IGNORED), None), (ids, first)):
        call = {"target_ids": target_ids, "ignore_index": IGNORED, "row_indices": rows, "backend": backend}
        leaf = logits.clone().requires_grad_()
        result = fused_logp(leaf, min_logit=least, **call)
        result.sum().backward()
        assert torch.equal(result, fused_logp(logits, **call))
        assert not leaf.grad[2].any()
        with pytest.raises(ValueError, match="min_logit: expected numbers, got NaN"):
            fused_logp(logits, min_logit=least.roll(1), **call)
