"""What the rules of all operators do not show: main_grad bit by bit, gradients that are asked for, special values."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core.calls import forget
from rl_kernels.core.testing import IGNORED, Draw
from rl_kernels.linear_logp import linear_logp
from rl_kernels.linear_logp.backends import native

ROWS, SIZE, VOCAB = 100, 20, 2100
OPERANDS = ("hidden", "lm_head_weight", "bias")


def _call(dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    draw = Draw(dtype, seed=11)
    operands = draw.normal(ROWS, SIZE), draw.normal(VOCAB, SIZE, scale=SIZE**-0.5), draw.normal(VOCAB)
    leaves = {name: value.requires_grad_() for name, value in zip(OPERANDS, operands, strict=True)}
    return {**leaves, "target_ids": draw.ids(VOCAB, ROWS), "temperature": 0.8, "backend": "native", **options}


def _backward(call: dict[str, Any], *ends: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Run forward and backward on the rows between ends, under autocast to a dtype; return ``main_grad``."""
    call["lm_head_weight"].main_grad = torch.zeros(VOCAB, SIZE)
    upstream = Draw(torch.float32, seed=12).normal(ROWS)
    for start, stop in pairwise((0, *ends, ROWS)):
        rows = slice(start, stop)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            result = linear_logp(**{**call, "hidden": call["hidden"][rows], "target_ids": call["target_ids"][rows]})
        result.backward(upstream[rows])
    assert call["lm_head_weight"].grad is None
    return call["lm_head_weight"].main_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.smoke
def test_main_grad_of_micro_batches_is_the_unrounded_gradient(dtype: torch.dtype) -> None:
    whole, plain = _call(dtype), _call(dtype)
    expected = _backward(whole)
    linear_logp(**plain).backward(Draw(torch.float32, seed=12).normal(ROWS))
    assert torch.equal(expected.to(dtype), plain["lm_head_weight"].grad)
    for ends in ((), (16,), (48, 64), (*range(16, ROWS, 16),)):
        parts = _call(dtype)
        assert torch.equal(_backward(parts, *ends), expected)
        assert torch.equal(parts["hidden"].grad, whole["hidden"].grad)
        assert torch.equal(whole["hidden"].grad, plain["hidden"].grad)
    # Under autocast the buffer is that of the weight before the cast.
    if dtype == torch.bfloat16:
        assert torch.equal(_backward(_call(), dtype=dtype), expected)


def test_double_backward_with_main_grad_raises() -> None:
    call = _call()
    call["lm_head_weight"].main_grad = torch.zeros(VOCAB, SIZE)
    leaves = call["hidden"], call["lm_head_weight"]
    grad, _ = torch.autograd.grad(linear_logp(**call).square().sum(), leaves, create_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_only_requested_gradients_are_computed() -> None:
    """``needs_input_grad`` says which may be; the pass under way may need fewer, and main_grad is not to be touched."""
    call, steps = _call(), native.Steps
    leaves = [call[name] for name in OPERANDS]
    expected = torch.autograd.grad(linear_logp(**call).sum(), leaves)
    for needed in product((False, True), repeat=3):
        asked = [leaf for leaf, is_asked in zip(leaves, needed, strict=True) if is_asked]
        if not asked:
            continue
        forget()
        with (
            patch.object(steps, "dhidden", autospec=True, side_effect=steps.dhidden) as dhidden,
            patch.object(steps, "dweight", autospec=True, side_effect=steps.dweight) as dweight,
            patch.object(steps, "dlogits", autospec=True, side_effect=steps.dlogits) as dz,
        ):
            grads = torch.autograd.grad(linear_logp(**call).sum(), asked)
            for leaf in leaves:
                leaf.grad = None
            linear_logp(**call).sum().backward(inputs=asked)
        result = dhidden.called, dweight.called, dz.call_args.args[-2] is not None
        assert result == needed
        own = [grad for grad, is_asked in zip(expected, needed, strict=True) if is_asked]
        assert all(map(torch.equal, grads, own))
        assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(asked, own, strict=True))
    total = call["lm_head_weight"].main_grad = torch.zeros(VOCAB, SIZE)
    torch.autograd.grad(linear_logp(**call).sum(), leaves[::2])
    assert not total.any()
    torch.autograd.grad(linear_logp(**call).sum(), leaves[1], allow_unused=True)
    assert bool(total.any())


@pytest.mark.parametrize("bad", [-(2**62), 2**62])
def test_an_unchecked_id_of_63_bits_gives_nan_for_its_row_alone(bad: int) -> None:
    call = _call(validate=False)
    good = linear_logp(**call)
    call["target_ids"][5] = bad
    others = torch.arange(ROWS) != 5
    result = linear_logp(**call)
    assert result[5].isnan()
    assert torch.equal(result[others], good[others])
    result.sum().backward()
    assert call["hidden"].grad[5].isnan().all()
    assert call["hidden"].grad[others].isfinite().all()


def test_all_positions_ignored_with_infinite_weight() -> None:
    call = _call(ignore_index=IGNORED)
    call["target_ids"][:] = IGNORED
    call["lm_head_weight"].data[7] = torch.inf
    result = linear_logp(**call)
    assert not result.any()
    result.backward(torch.full((ROWS,), torch.nan))
    assert not any(call[name].grad.any() for name in OPERANDS)


def test_target_of_probability_zero() -> None:
    call = _call(return_stats=True)
    call["bias"].data[int(call["target_ids"][0])] = -torch.inf
    stats = linear_logp(**call)
    assert stats.logp[0] == -torch.inf
    assert stats.logsumexp.isfinite().all()
    assert stats.entropy.isfinite().all()


def test_hidden_size_zero() -> None:
    hidden, weight = torch.zeros(2, 3, 0, requires_grad=True), torch.zeros(4, 0, requires_grad=True)
    logp = linear_logp(hidden, weight, torch.zeros(2, 3, dtype=torch.int64))
    torch.testing.assert_close(logp, torch.full((2, 3), 0.25).log())
    logp.sum().backward()
    assert (hidden.grad.shape, weight.grad.shape) == (hidden.shape, weight.shape)
