"""What fused_logp promises about bits beyond the conformance tests, and what it does with special values."""

import math

import pytest
import torch

from rl_kernels.core.testing.references import bits_of
from rl_kernels.fused_logp import fused_logp
from rl_kernels.lab.check.compare import bits

IGNORED = -100


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randint(0, shape[-1], shape[:-1], generator=generator)


def gradient(logits, ids, upstream=None, **options):
    leaf = logits.clone().requires_grad_()
    result = fused_logp(leaf, ids, return_stats=True, **options)
    ones = [torch.ones_like(value) for value in result] if upstream is None else upstream
    return torch.autograd.grad(result, leaf, ones)[0]


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
def test_garbage_under_the_mask_is_never_read(garbage):
    logits, ids = draw(6, 50)
    masked = torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.bool)
    ids = ids.masked_fill(masked, IGNORED)
    dirty = logits.masked_fill(masked[:, None], garbage)
    upstream = [torch.ones(6).masked_fill(masked, garbage) for _ in range(3)]
    clean = fused_logp(logits, ids, ignore_index=IGNORED, return_stats=True)
    found = fused_logp(dirty, ids, ignore_index=IGNORED, return_stats=True)
    for value, expected in zip(found, clean, strict=True):
        assert bits(value, expected).passed
        assert bits(value[masked], torch.zeros(3)).passed
    grad = gradient(dirty, ids, upstream, ignore_index=IGNORED)
    assert bits(grad[masked], torch.zeros(3, 50)).passed
    assert bits(grad, gradient(logits, ids, ignore_index=IGNORED)).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_is_nan_and_alone_in_it(bad):
    logits, ids = draw(3, 20)
    expected = fused_logp(logits, ids, return_stats=True)
    logits[1, 4] = bad
    for value, good in zip(fused_logp(logits, ids, return_stats=True), expected, strict=True):
        assert value.isnan().tolist() == [False, True, False]
        assert bits(value[::2], good[::2]).passed


def test_a_row_of_minus_infinity_is_nan():
    logits, ids = draw(2, 9)
    logits[0] = -math.inf
    for value in fused_logp(logits, ids, return_stats=True):
        assert value.isnan().tolist() == [True, False]


def test_a_selected_masked_entry_is_minus_infinity_with_a_finite_gradient():
    logits, _ = draw(1, 9)
    logits[0, 3] = -math.inf
    ids = torch.tensor([3])
    assert float(fused_logp(logits, ids)) == -math.inf
    leaf = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(fused_logp(leaf, ids), leaf)
    assert grad.isfinite().all()
    assert float(grad[0, 3]) == 1.0


def test_unchecked_ids_and_rows_give_nan_and_read_nothing_outside():
    logits, ids = draw(4, 10)
    good = fused_logp(logits, ids)
    found = fused_logp(logits, torch.tensor([int(ids[0]), 10, -5, 10**9]), validate=False)
    assert bits(found[0], good[0]).passed
    assert found[1:].isnan().all()
    rows = {"row_indices": torch.tensor([0, 10**9, -7]), "validate": False}
    fused_logp(logits, ids, **rows, out=torch.zeros(4))
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        fused_logp(leaf * 1, ids, **rows, inplace_backward=inplace).sum().backward()
        assert leaf.grad.isfinite().all()
    assert fused_logp(logits[:0], ids[:0], **rows).shape == (0,)


def test_rows_outside_the_index_are_left_alone_in_out():
    logits, ids = draw(2, 3, 10)
    out = torch.full((2, 3), 7.0)
    ids[1] = 10**6
    result = fused_logp(logits, ids, row_indices=torch.tensor([2, 0]), out=out)
    assert result is out
    expected = fused_logp(logits[0], ids[0])
    assert bits(out[0, ::2], expected[::2]).passed
    assert out[0, 1] == 7.0
    assert (out[1] == 7.0).all()


def test_out_keeps_its_storage_and_strides():
    logits, ids = draw(5, 10)
    out = torch.zeros(5, 2)[:, 0]
    address = out.data_ptr()
    assert fused_logp(logits, ids, out=out).data_ptr() == address
    assert bits(out, fused_logp(logits, ids)).passed


def test_out_refuses_logits_that_require_grad():
    logits, ids = draw(5, 10)
    with pytest.raises(ValueError, match="out: expected None"):
        fused_logp(logits.requires_grad_(), ids, out=torch.zeros(5))
    with torch.no_grad():
        fused_logp(logits, ids, out=torch.zeros(5))


def test_the_gradient_overwrites_the_logits_once():
    logits, ids = draw(5, 10)
    expected = gradient(logits, ids)
    inner = logits.clone().requires_grad_()
    result = fused_logp(inner, ids, return_stats=True, inplace_backward=True)
    total = sum(value.sum() for value in result)
    (grad,) = torch.autograd.grad(total, inner, retain_graph=True)
    assert bits(grad, expected).passed
    assert grad.data_ptr() == inner.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, inner)


def test_an_expanded_tensor_cannot_be_overwritten():
    logits = torch.randn(1, 10).expand(5, 10)
    with pytest.raises(ValueError, match="inplace_backward: logits: expected elements with storage of their own"):
        fused_logp(logits, torch.zeros(5, dtype=torch.long), inplace_backward=True)


@pytest.mark.parametrize("shape", [(0, 7), (3, 0, 7), (7,), (1, 7), (2, 1, 3, 7)])
def test_empty_and_odd_shapes(shape):
    logits, ids = draw(*shape)
    for value in fused_logp(logits, ids, return_stats=True):
        assert value.shape == shape[:-1]
    assert gradient(logits, ids).shape == shape


def test_an_all_masked_batch_is_zero():
    logits, ids = draw(3, 7)
    ids[:] = IGNORED
    for value in fused_logp(logits, ids, ignore_index=IGNORED, return_stats=True):
        assert bits(value, torch.zeros(3)).passed


@pytest.mark.parametrize("wanted", ["logp", "logsumexp", "entropy"])
def test_gradient_of_one_statistic_alone(wanted):
    logits, ids = draw(4, 30)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = torch.autograd.grad(getattr(fused_logp(leaf, ids, return_stats=True), wanted).sum(), leaf)[0]
    gold = fused_logp(exact, ids, return_stats=True, output_dtype=torch.float64)
    expected = torch.autograd.grad(getattr(gold, wanted).sum(), exact)[0]
    torch.testing.assert_close(found, expected.float(), atol=1e-6, rtol=1e-5)


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
