"""What fused_logp promises about bits, and does with special values, beyond the rules of all operators."""

import math

import pytest
import torch

from rl_kernels.core.testing import IGNORED
from rl_kernels.core.testing.references import bits_of
from rl_kernels.fused_logp import fused_logp
from rl_kernels.lab.check.compare import bits


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randint(0, shape[-1], shape[:-1], generator=generator)


@pytest.mark.parametrize("vocab", [1, 5, 4095, 4096, 4097, 12289])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(vocab, torch_threads):
    logits, ids = draw(67, vocab)
    whole = fused_logp(logits, ids, return_stats=True)
    for count in (1, 2):
        with torch_threads(count):
            for row in (0, 1, 33, 66):
                alone = fused_logp(logits[row], ids[row], return_stats=True)
                for one, all_ in zip(alone, whole, strict=True):
                    assert bits(one, all_[row]).passed


def test_masked_entries_of_the_vocabulary_appended_change_no_bit():
    logits, ids = draw(4, 300)
    padded = torch.cat((logits, torch.full((4, 5000), -math.inf)), 1)
    for short, long in zip(*(fused_logp(z, ids, return_stats=True) for z in (logits, padded)), strict=True):
        assert bits(long, short).passed


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_garbage_under_the_mask_of_a_whole_batch_is_never_read(garbage):
    logits, ids = torch.full((3, 7), garbage, requires_grad=True), torch.full((3,), IGNORED)
    stats = fused_logp(logits, ids, ignore_index=IGNORED, return_stats=True)
    (grad,) = torch.autograd.grad(stats, logits, [torch.full((3,), garbage)] * 3)
    assert all(bits(value.detach(), torch.zeros(value.shape)).passed for value in (*stats, grad))


def test_a_selected_masked_entry_is_minus_infinity_with_a_finite_gradient():
    logits, ids = draw(1, 9)[0], torch.tensor([3])
    logits[0, 3] = -math.inf
    found = fused_logp(logits.requires_grad_(), ids)
    assert found.item() == -math.inf
    (grad,) = torch.autograd.grad(found, logits)
    assert grad.isfinite().all()
    assert float(grad[0, 3]) == 1.0


def test_unchecked_ids_and_rows_give_nan_and_read_nothing_outside():
    logits, ids = draw(4, 10)
    good = fused_logp(logits, ids)
    found = fused_logp(logits, torch.tensor([int(ids[0]), 10, -(2**62), 10**9]), validate=False)
    assert bits(found[0], good[0]).passed
    assert found[1:].isnan().all()
    rows = {"row_indices": torch.tensor([0, 10**9, -7]), "validate": False}
    fused_logp(logits, ids, **rows, out=torch.zeros(4))
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        fused_logp(leaf * 1, ids, **rows, inplace_backward=inplace).sum().backward()
        assert leaf.grad.isfinite().all()
    assert fused_logp(logits[:0], ids[:0], **rows).shape == (0,)


def test_ids_of_rows_that_are_left_out_are_not_checked():
    logits, ids = draw(2, 3, 10)
    ids[1] = 10**6
    found = fused_logp(logits, ids, row_indices=torch.tensor([2, 0]))
    assert bits(found[0, ::2], fused_logp(logits[0], ids[0])[::2]).passed
    assert not found[1].any()


@pytest.mark.parametrize("vocab", [1, 2, 7, 33])
def test_a_row_that_is_no_distribution_has_one_nan_wherever_it_stands(vocab):
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
