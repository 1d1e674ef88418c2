"""``min_logit`` gives each row the bits of a bias that masks the columns below it, and with -inf those of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.testing import IGNORED, Draw, bits_of
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.linear_logp import Memory, linear_logits, linear_logp, linear_logp_from_known, linear_logp_known
from rl_kernels.linear_logp.op import OPERATOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = (
    "rl_kernels.core.rowwise.softmax",
    *(f"rl_kernels.linear_logp.{name}" for name in ("inputs", "backward", "backends.native")),
)
BUGS = (
    Bug("threshold before the temperature", "(x if temperature is None else x / temperature) <", "x <"),
    Bug("a logit at the threshold not kept", "x / temperature) < least", "x / temperature) <= least"),
    Bug("gradient of a column that is not kept", "gradient.masked_fill_(below", "gradient.masked_fill(below"),
    Bug("threshold of the first rows", "self[7:14]", "self[8:14]"),
)


def run(call: dict[str, Any], upstream: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Return statistics and gradients of hidden states and weight."""
    leaves = {name: call[name].clone().requires_grad_() for name in ("hidden", "lm_head_weight")}
    result = linear_logp(**{**call, **leaves, **options}, return_stats=True, validate=False)
    torch.autograd.backward(list(result), upstream)
    return [*(value.detach() for value in result), *(leaf.grad for leaf in leaves.values())]


def check(backend: str, shape: tuple[int, int, int], dtype: torch.dtype, **options: Any) -> None:
    (rows, size, vocab), wide = shape, compute_dtype(dtype)
    draw = Draw(dtype, DEVICE, seed=vocab)
    hidden, weight, scales = draw.normal(rows, size), draw.normal(vocab, size), draw.uniform(0.3, 2.0, rows, dtype=wide)
    with torch.no_grad():
        z = linear_logits(hidden, weight, backend=backend).logits / scales[:, None]
    rank = draw.uniform(0, vocab, rows, dtype=torch.float64).long()
    # In its block of columns the largest logit alone is kept, at the threshold.
    rank[0] = 0
    least = z.sort(-1, descending=True).values.gather(1, rank[:, None])[:, 0]
    ids = torch.where(draw.mask(0.5, rows), z.argmax(-1), draw.ids(vocab, rows))
    upstream = [draw.normal(rows, dtype=wide) for _ in range(3)]
    call = {"hidden": hidden, "lm_head_weight": weight, "target_ids": ids, "temperature": scales, "backend": backend}
    call |= options
    result = run(call, upstream, min_logit=least)
    # The logp of a target that is not kept has no gradient.
    kept = z.gather(1, ids[:, None])[:, 0] >= least
    assert torch.equal(result[0] == -torch.inf, ~kept)
    upstream[0] = torch.where(kept, upstream[0], 0.0)
    for row in {0, 1 % rows, rows - 1}:
        at = slice(row, row + 1)
        bias = torch.where(z[row] < least[row], -torch.inf, 0.0).to(dtype)
        alone = {**call, "hidden": hidden[at], "target_ids": ids[at], "temperature": scales[at], "bias": bias}
        for one, other in zip(run(alone, [value[at] for value in upstream])[:4], result[:4], strict=True):
            assert torch.equal(one, other[at])
    none, every = run(call, upstream), run(call, upstream, min_logit=torch.full_like(least, -torch.inf))
    assert all(torch.equal(bits_of(one), bits_of(other)) for one, other in zip(none, every, strict=True))


def backends(dtype: torch.dtype, size: int) -> list[str]:
    described = Call.of(torch.zeros(1, dtype=dtype, device=DEVICE), D=size)
    return [backend.name for backend in OPERATOR.backends if backend.why_not(described) is None]


CASES = (
    ((3, 8, 70), torch.float32, {}),
    ((5, 24, 1300), torch.float16, {"vocab_segments": 8}),
    ((70, 16, 600), torch.float32, {"memory": Memory(saved_mib=0)}),
    ((2, 16, 2100), torch.float64, {"memory": Memory(saved_mib=0)}),
)
LARGE = (
    ((300, 136, 5000), torch.bfloat16, {"memory": Memory(saved_mib=0)}),
    ((40, 136, 50257), torch.bfloat16, {}),
    ((130, 64, 9001), torch.float16, {"memory": Memory(saved_mib=2)}),
    ((2100, 64, 9001), torch.bfloat16, {"vocab_segments": 8, "memory": Memory(saved_mib=0)}),
)


@pytest.mark.parametrize(("shape", "dtype", "options"), CASES, ids=str)
def test_min_logit_is_a_mask(shape: tuple[int, int, int], dtype: torch.dtype, options: dict[str, Any]) -> None:
    for backend in backends(dtype, shape[1]):
        # On a GPU native promises no bits of a row.
        if (backend, DEVICE) != ("native", "cuda"):
            check(backend, shape, dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype", "options"), [*CASES[:3], *LARGE], ids=str)
def test_min_logit_on_a_gpu(
    gpu_backend: str, shape: tuple[int, int, int], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    if gpu_backend in backends(dtype, shape[1]):
        check(gpu_backend, shape, dtype, **options)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_in_min_logit_shows(bug: Bug) -> None:
    with planted(NATIVE, bug), pytest.raises((AssertionError, RuntimeError, TypeError)):
        check("native", (1100, 4, 300), torch.float32, memory=Memory(saved_mib=0))


def test_targets_below_min_logit_raise_and_nothing_kept_is_nan() -> None:
    draw = Draw(torch.float32, DEVICE, seed=1)
    call = {"hidden": draw.normal(4, 8), "lm_head_weight": draw.normal(50, 8), "target_ids": draw.ids(50, 4)}
    call["target_ids"][3] = IGNORED
    least = torch.tensor([100.0, -100.0, -100.0, torch.nan], device=DEVICE)
    options = {"min_logit": least, "ignore_index": IGNORED}
    assert linear_logp(**call, **options, validate=False).isnan().tolist() == [True, False, False, False]
    known = linear_logp_known(**call, **options, validate=False)
    for function in (linear_logp, linear_logp_known, lambda **more: linear_logp_from_known(**more, known=known)):
        with pytest.raises(ValueError, match="at least min_logit, 1 of 4 are below it"):
            function(**call, **options)
    # A NaN counts only where the id does.
    options["min_logit"] = least.clamp(max=-100.0)
    assert torch.equal(linear_logp(**call, **options), linear_logp(**call, ignore_index=IGNORED))
    with pytest.raises(ValueError, match="min_logit: expected numbers, got NaN"):
        linear_logp(**call, min_logit=options["min_logit"].roll(1), ignore_index=IGNORED)
