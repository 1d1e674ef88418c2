"""What fused_logp promises about bits, and does with special values, beyond the rules of all operators."""

import math

import pytest
import torch

from rl_kernels.core.ulps import bits_of
from rl_kernels.fused_logp import fused_logp
from rl_kernels.lab.check.compare import bits


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randint(0, shape[-1], shape[:-1], generator=generator)


def test_appended_masked_entries_change_no_bit():
    logits, ids = draw(4, 300)
    padded = torch.cat((logits, torch.full((4, 5000), -math.inf)), 1)
    for short, long in zip(*(fused_logp(z, ids, return_stats=True) for z in (logits, padded)), strict=True):
        assert bits(long, short).passed


def test_selected_masked_entry_has_a_finite_gradient():
    logits, ids = draw(1, 9)[0], torch.tensor([3])
    logits[0, 3] = -math.inf
    found = fused_logp(logits.requires_grad_(), ids)
    assert found.item() == -math.inf
    (grad,) = torch.autograd.grad(found, logits)
    assert grad.isfinite().all()
    assert float(grad[0, 3]) == 1.0


def test_unchecked_ids_give_nan_and_unchecked_rows_are_clamped():
    logits, ids = draw(4, 10)
    good = fused_logp(logits, ids)
    found = fused_logp(logits, torch.tensor([int(ids[0]), 10, -(2**62), 10**9]), validate=False)
    assert bits(found[0], good[0]).passed
    assert found[1:].isnan().all()
    assert fused_logp(logits[:3], ids[:3], temperature=torch.zeros(3), validate=False).shape == (3,)
    rows = {"row_indices": torch.tensor([0, 10**9, -7]), "validate": False}
    fused_logp(logits, ids, **rows, out=torch.zeros(4))
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        fused_logp(leaf * 1, ids, **rows, inplace_backward=inplace).sum().backward()
        assert leaf.grad.isfinite().all()
    assert fused_logp(logits[:0], ids[:0], **rows).shape == (0,)


def test_ids_of_rows_not_in_row_indices_are_not_checked():
    logits, ids = draw(2, 3, 10)
    ids[1] = 10**6
    found = fused_logp(logits, ids, row_indices=torch.tensor([2, 0]))
    assert bits(found[0, ::2], fused_logp(logits[0], ids[0])[::2]).passed
    assert not found[1].any()


@pytest.mark.parametrize("vocab", [1, 2, 7, 33])
def test_undefined_rows_give_the_same_nan_in_every_place(vocab):
    bad = torch.full((1, vocab), -torch.inf)
    bad[0, -1] = torch.inf
    wanted = bits_of(torch.tensor(torch.nan))
    for rows in (1, 2, 5, 8, 9, 17):
        logits = bad.repeat(rows, 1).requires_grad_()
        ids = torch.zeros(rows, dtype=torch.int64)
        results = fused_logp(logits, ids, return_stats=True, backend="native")
        (gradient,) = torch.autograd.grad(sum(each.sum() for each in results), logits)
        for found in (*results, gradient):
            assert (bits_of(found.detach()) == wanted).all(), (rows, found)
