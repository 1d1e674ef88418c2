"""The reductions of batch_invariant_ops in Triton: the bits of the sums and roundings that many launches take."""

import pytest
import torch

from rl_kernels.core.constants import SEGMENT
from rl_kernels.models.clients.batch_invariant_ops import reductions


@pytest.fixture
def dtype(triton_dtype):
    return triton_dtype


def drawn(shape, device, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device, dtype)


def launches(monkeypatch, kernel):
    """Return a list that grows with each launch of the kernel."""
    seen, launch = [], reductions.launch

    def watched(what, *args, **options):
        if what.fn.__name__ == kernel:
            seen.append(what)
        launch(what, *args, **options)

    monkeypatch.setattr(reductions, "launch", watched)
    return seen


def unfused(monkeypatch, call, *args):
    with monkeypatch.context() as patch:
        patch.setattr(reductions, "fits", lambda *_: False)
        return call(*args)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(70, 1), (70, 3), (3, 100), (70, 300), (2, 2049), (3, SEGMENT), (2, SEGMENT + 1), (1, 17 * SEGMENT + 5)],
)
def test_mean_has_the_bits_of_tree_sum(monkeypatch, device, dtype, rows, columns):
    x = drawn((rows, columns), device, dtype)
    seen = launches(monkeypatch, "segment_sums")
    expected = unfused(monkeypatch, reductions.mean, x, -1, False)
    assert not seen
    found = reductions.mean(x, -1, False)
    assert len(seen) == 1
    assert torch.equal(found, expected)
    assert torch.equal(reductions.mean(x.t().contiguous().t(), -1, False), found)
    assert torch.equal(reductions.mean(torch.cat((x, x), 1)[:, :columns], 1, True)[:, 0], found)
    assert torch.equal(reductions.mean(x[rows - 1 :], -1, False), found[rows - 1 :])
    wide = reductions.mean(x, -1, False, torch.float32)
    assert torch.equal(wide, unfused(monkeypatch, reductions.mean, x, -1, False, torch.float32))


def test_mean_over_several_dims_and_signs_of_zero(monkeypatch, device, dtype):
    x = drawn((5, 4, 3, 50), device, dtype)
    for dims in (0, (0, 2), (1, 3), None):
        found = reductions.mean(x, dims, True)
        assert torch.equal(found, unfused(monkeypatch, reductions.mean, x, dims, True))
    nothing = torch.full((3, 5), -0.0, device=device, dtype=dtype)
    assert reductions.mean(nothing, 1, False).signbit().sum() == 0


def test_views_that_are_negated_lazily_and_results_of_other_dtypes(device, dtype):
    x = torch.imag(drawn((3, 40), device, torch.complex64).conj())
    assert x.is_neg()
    assert torch.equal(reductions.mean(x, 1, False), reductions.mean(x.resolve_neg(), 1, False))
    assert torch.equal(reductions.log_probabilities(x, 1), reductions.log_probabilities(x.resolve_neg(), 1))
    x = drawn((3, 40), device, dtype)
    assert torch.equal(reductions.mean(x, 1, False, torch.float64), reductions.mean(x.double(), 1, False))
    eighth = torch.float8_e5m2
    assert torch.equal(
        reductions.mean(x, 1, False, eighth).float(), reductions.mean(x.float(), 1, False).to(eighth).float()
    )


def test_mean_with_a_gradient_has_the_same_bits(device, dtype):
    x = drawn((7, 900), device, dtype)
    leaf = x.clone().requires_grad_()
    found = reductions.mean(leaf, 1, False)
    assert torch.equal(found.detach(), reductions.mean(x, 1, False))
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    torch.testing.assert_close(grad, torch.full_like(x, 1 / 900))


@pytest.mark.parametrize("columns", [1, 5, 4097])
def test_log_softmax_has_the_bits_of_both_subtractions(monkeypatch, device, dtype, columns):
    x = 8 * drawn((9, columns), device, dtype) + 100
    seen = launches(monkeypatch, "log_softmax")
    expected = unfused(monkeypatch, reductions.log_probabilities, x, -1)
    assert not seen
    assert torch.equal(reductions.log_probabilities(x, -1), expected)
    assert len(seen) == 1
    assert torch.equal(reductions.log_probabilities(x.t().contiguous(), 0).t(), expected)
    assert torch.equal(reductions.log_probabilities(torch.cat((x, x), 1)[:, :columns], 1), expected)
    assert torch.equal(reductions.log_probabilities(x[4:5], -1), expected[4:5])
    wide = reductions.log_probabilities(x, -1, torch.float32)
    assert torch.equal(wide, unfused(monkeypatch, reductions.log_probabilities, x, -1, torch.float32))


def test_triton_rows_that_are_no_distribution(device, dtype):
    inf = torch.inf
    x = torch.tensor([[0.0, -inf, 1.0], [-inf] * 3, [inf, 0.0, 0.0], [torch.nan, 0.0, 0.0]], device=device, dtype=dtype)
    found = reductions.log_probabilities(x, -1)
    assert found[0, 1] == -inf
    assert found[0].isfinite().tolist() == [True, False, True]
    assert found[1:].isnan().all()


def test_log_softmax_is_never_above_0(monkeypatch, device, dtype):
    # The log of a sum of one power, as GPUs round it.
    norm = torch.tensor([[3.0, -6e-8]], device=device)
    x = torch.tensor([[3.0, -torch.inf, torch.nan]], device=device, dtype=dtype)
    for found in (
        reductions._minus_norm(x, norm, torch.float32),
        unfused(monkeypatch, reductions._minus_norm, x, norm, torch.float32),
    ):
        assert found[0, :2].tolist() == [0.0, -torch.inf]
        assert found[0, 2].isnan()
