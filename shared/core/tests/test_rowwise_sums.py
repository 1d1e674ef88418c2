from itertools import product

import pytest
import torch

from rl_kernels.core.constants import SEGMENT
from rl_kernels.core.rowwise.logp_gradient import LogpUpstream, dlogits
from rl_kernels.core.rowwise.softmax import finish, merge, softmax_state
from rl_kernels.core.rowwise.sums import _library_is_invariant, row_sum, tree_sum
from rl_kernels.core.testing import Draw, bits_of

LENGTHS = (1, 2, 3, 5, 16, 31, 4095, 4096, 4097, 8192, 10_001)
NAN, INF = torch.nan, torch.inf


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(bits_of(left), bits_of(right))


# A tree of n terms rounds each of them log2(n) times, then once a segment; the library's sum of 64 terms in 16 lanes
# rounds 3 + 16 times, the sum of these is FP64.
ROUNDS = {
    row_sum: lambda length: 20,
    tree_sum: lambda length: length.bit_length() + length // SEGMENT + 1,
}
each_sum = pytest.mark.parametrize("total", ROUNDS, ids=lambda total: total.__name__)


@each_sum
@pytest.mark.parametrize("length", LENGTHS)
def test_sum_of_a_row_against_fp64_and_with_zeros_appended(length, total):
    x = Draw(torch.float32).normal(3, length)
    found, gold = total(x), x.double().sum(-1)
    assert ((found.double() - gold).abs() <= ROUNDS[total](length) * 2.0**-24 * x.double().abs().sum(-1)).all()
    for zero in (0.0, -0.0):
        for more in (1, 7, 4096, 5000):
            padded = torch.cat((x, torch.full((3, more), zero)), -1)
            assert same_bits(total(padded), found), f"{more} times {zero} appended"


@each_sum
def test_a_row_of_zeros_of_any_sign_sums_to_plus_zero(total):
    for length in (0, 1, 3, 4096, 4097):
        for sign in (1.0, -1.0):
            assert same_bits(total(sign * torch.zeros(2, length)), torch.zeros(2))
        assert total(torch.zeros(0, length)).shape == (0,)


@each_sum
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("length", [33, 4097, 40_000])
def test_a_rows_sum_depends_on_neither_batch_nor_strides(torch_threads, threads, length, total):
    x = Draw(torch.float32).normal(5, length)
    with torch_threads(threads):
        expected = total(x)
        for row in range(5):
            assert same_bits(total(x[row]), expected[row])
        assert same_bits(total(x.t().contiguous().t()), expected)
        assert same_bits(total(x.repeat_interleave(2, 1)[:, ::2]), expected)
        assert same_bits(total(x.view(5, 1, length)), expected[:, None])
        assert same_bits(total(x.repeat(40, 1)), expected.repeat(40))


@pytest.mark.parametrize("height", [1, 3])
def test_a_library_that_sums_few_rows_in_another_order_is_not_used(monkeypatch, height):
    library = torch.Tensor.sum

    def planted(x, dim):
        return library(x * 3 if len(x) == height else x, dim)

    x = Draw(torch.float32).normal(5, 1000)
    _library_is_invariant.cache_clear()
    monkeypatch.setattr(torch.Tensor, "sum", planted)
    try:
        assert same_bits(row_sum(x), tree_sum(x))
    finally:
        _library_is_invariant.cache_clear()


def one(x):
    """Return a temperature of 1 for each row."""
    return torch.ones_like(x[:, :1])


def found(x, cuts=(), temperature=None):
    scale = one(x) if temperature is None else temperature
    first, *others = (softmax_state(part, scale, entropy=True) for part in x.tensor_split(cuts, dim=1))
    for part in others:
        first = merge(first, part, scale)
    return finish(first, scale)


def statistics(x, cuts=()):
    return found(x, cuts)[1:]


def gold(z):
    log_p = z.double().log_softmax(-1)
    return z.double().logsumexp(-1), -torch.where(log_p == -INF, 0.0, log_p.exp() * log_p).sum(-1)


@pytest.mark.smoke
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_softmax_states_give_logsumexp_and_entropy(scale, offset):
    z = Draw(torch.float32).normal(4, 1000, scale=scale) + offset
    gold_lse, gold_entropy = gold(z)
    for cuts in ((), (1,), (500,), (3, 4, 999)):
        lse, entropy = statistics(z, cuts)
        torch.testing.assert_close(lse.double(), gold_lse, rtol=2.0**-22, atol=1e-6)
        torch.testing.assert_close(entropy.double(), gold_entropy, rtol=1e-5, atol=1e-5)
    z = Draw(torch.float64).normal(4, 1000)
    for value, expected in zip(statistics(z, (17,)), gold(z), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("cuts", [(), (1,), (2,)], ids=str)
def test_values_far_from_0_keep_the_digits_of_their_differences(cuts, temperature):
    rows = [[3e38, 3e38, -3e38], [-3e38, -3e38, -3e38], [3e38, 1e38, 0.0]]
    x = torch.tensor([*rows, [1e10, 0.0, 1e10], [1e6, 1e6 - 1, 1e6 + 0.5], [-1e6, 1e6 + 0.0625, 1e6]])
    scale, ids = torch.full((6, 1), temperature), torch.ones(6, dtype=torch.int64)
    stats = found(x, cuts, scale)
    z = (x.double() / scale.double()).requires_grad_()
    logs = z.log_softmax(-1)
    entropy = -(logs.exp() * torch.where(logs == -INF, 0.0, logs)).sum(-1)
    (logs[:, 1] + 0.5 * entropy).sum().backward()
    near = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(stats.logp(x[:, 1], scale), logs[:, 1].float(), **near)
    torch.testing.assert_close(stats.entropy, entropy.float(), **near)
    torch.testing.assert_close(stats.logsumexp, z.logsumexp(-1).float(), **near)
    up = LogpUpstream(ids, stats.norm, stats.entropy, torch.ones(6), None, torch.full((6,), 0.5))
    torch.testing.assert_close(dlogits(x, scale, up) * scale, z.grad.float(), **near)


def test_minus_inf_is_an_entry_that_is_not_there():
    z = Draw(torch.float32).normal(3, 7)
    z[0, :2], z[1, 2:5], z[2, 1:] = -INF, -INF, -INF
    gold_lse, gold_entropy = gold(z)
    for cuts in ((), (2,), (2, 5)):
        lse, entropy = statistics(z, cuts)
        torch.testing.assert_close(lse.double(), gold_lse, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(entropy.double(), gold_entropy, rtol=1e-6, atol=1e-6)
        assert (lse[2], entropy[2]) == (z[2, 0], 0)


@pytest.mark.parametrize("row", [[-INF] * 7, [NAN, *[1.0] * 6], [*[1.0] * 6, NAN], [1.0, INF, *[-INF] * 5], [INF] * 7])
def test_a_row_without_a_softmax_is_nan_and_its_neighbors_are_not(row):
    for cuts in ((), (2,), (6,)):
        z = Draw(torch.float32).normal(3, 7)
        expected = statistics(z, cuts)
        z[1] = torch.tensor(row)
        for value, before in zip(statistics(z, cuts), expected, strict=True):
            assert value[1].isnan()
            assert same_bits(value[::2], before[::2])


def test_softmax_statistics_of_a_row_do_not_depend_on_the_batch(torch_threads):
    z = Draw(torch.float32).normal(9, 5001)
    for threads, cuts in product((1, 2), ((), (4096,))):
        with torch_threads(threads):
            alone = [torch.cat(each) for each in zip(*(statistics(row, cuts) for row in z.split(1)), strict=True)]
            assert all(map(same_bits, alone, statistics(z, cuts)))


@pytest.mark.parametrize("vocab", [7, 4090, 5001])
def test_statistics_ignore_strides_masked_columns_and_whether_entropy_is_wanted(vocab):
    z = Draw(torch.float64).normal(4, vocab)
    lse, entropy = statistics(z)
    masked = torch.cat((z, z.new_full((4, 9), -INF)), 1)
    for same in (z.t().contiguous().t(), z.repeat_interleave(2, 1)[:, ::2], masked):
        assert all(map(same_bits, statistics(same), (lse, entropy)))
    alone = finish(softmax_state(z, one(z), entropy=False), one(z))
    assert same_bits(alone.norm, found(z).norm)
    assert alone.logsumexp is alone.entropy is None
    scale, parts = one(z), z.tensor_split((2, 5), 1)[:2]
    states = [[softmax_state(part, scale, entropy=wanted) for part in parts] for wanted in (True, False)]
    with_it, without = (finish(merge(*pair, scale), scale) for pair in states)
    assert same_bits(without.norm, with_it.norm)
    assert without.entropy is None


def upstream_of(z, ids, **grads):
    """Return LogpUpstream and the FP64 gradient that autograd finds for the sum of the weighted outputs."""
    leaf = z.double().requires_grad_()
    log_p = leaf.log_softmax(-1)
    outputs = {
        "grad_logp": log_p.gather(-1, ids[:, None])[:, 0],
        "grad_logsumexp": leaf.logsumexp(-1),
        "grad_entropy": -(log_p.exp() * log_p).sum(-1),
    }
    sum((outputs[name] * grad.double()).sum() for name, grad in grads.items()).backward()
    stats = found(z)
    return LogpUpstream(ids, stats.norm, stats.entropy, *(grads.get(name) for name in outputs)), leaf.grad


@pytest.mark.smoke
@pytest.mark.parametrize(
    "names",
    [("grad_logp",), ("grad_logsumexp",), ("grad_entropy",), ("grad_logp", "grad_logsumexp", "grad_entropy")],
    ids=" ".join,
)
def test_dlogits_against_autograd(names):
    draw = Draw(torch.float64)
    z, ids = draw.normal(6, 33), draw.ids(33, 6)
    up, expected = upstream_of(z, ids, **{name: draw.normal(6) for name in names})
    torch.testing.assert_close(dlogits(z, one(z), up), expected, rtol=1e-12, atol=1e-14)
    parts = [dlogits(z[:, first : first + 8], one(z), up, first) for first in range(0, 33, 8)]
    assert same_bits(torch.cat(parts, 1), dlogits(z, one(z), up))
    rows = torch.tensor([4, 1])
    assert same_bits(dlogits(z[rows], one(z)[rows], up.rows(rows)), dlogits(z, one(z), up)[rows])


def test_dlogits_without_upstream_or_of_a_minus_inf_entry_is_zero():
    z = Draw(torch.float32).normal(2, 5)
    up = LogpUpstream(torch.tensor([0, 1]), found(z).norm, None, None, None, None)
    assert same_bits(dlogits(z, one(z), up), torch.zeros(2, 5))
    draw = Draw(torch.float64)
    z, ids = draw.normal(3, 6), torch.tensor([0, 1, 2])
    z[:, 4] = -INF
    stats = found(z)
    up = LogpUpstream(ids, stats.norm, stats.entropy, *(draw.normal(3) for _ in range(3)))
    dz = dlogits(z, one(z), up)
    assert (dz[:, 4] == 0).all()
    assert dz.isfinite().all()
