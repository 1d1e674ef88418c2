from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from rl_kernels.core import blocks, products, verified
from rl_kernels.core.constants import STEP
from rl_kernels.core.products import matmul
from rl_kernels.core.rowwise.ids import outside, select
from rl_kernels.core.rowwise.operands import compute_dtype, pad_to
from rl_kernels.core.rowwise.softmax import per_row
from rl_kernels.core.testing import Draw, bits_of


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(bits_of(left), bits_of(right))


def spread(x):
    """Return x at every other element of its storage, in both dims."""
    wide = x.new_full((2 * x.shape[0], 2 * x.shape[1]), 7.0)
    wide[::2, ::2] = x
    return wide[::2, ::2]


def off_by_one(x):
    """Return x one element into its storage, where vector loads are not aligned."""
    return torch.cat((x.new_full((1,), 7.0), x.flatten()))[1:].view(x.shape)


HALF_AND_FLOAT = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = {
    "column by column": lambda x: x.t().contiguous().t(),
    "every other element": spread,
    "off by one": off_by_one,
}


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", HALF_AND_FLOAT)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 5), (64, 64, 64), (65, 129, 33), (2, 31, 4099)], ids=str)
def test_product_is_the_sum_in_fp32_rounded_once(shape, dtype):
    m, k, n = shape
    draw = Draw(dtype)
    a, b, bias = draw.normal(m, k), draw.normal(k, n), draw.normal(n)
    gold, terms = a.double() @ b.double() + bias.double(), a.double().abs() @ b.double().abs() + bias.double().abs()
    for out_dtype in HALF_AND_FLOAT:
        out = matmul(a, b, bias, out_dtype)
        assert out.dtype == out_dtype
        error = (out.double() - gold).abs()
        assert (error <= 8 * 2.0**-24 * terms + torch.finfo(out_dtype).eps / 2 * out.double().abs()).all()


def test_products_of_fp64_stay_there_and_may_be_empty():
    draw = Draw(torch.float64)
    a, b = draw.normal(5, 77), draw.normal(77, 9)
    out = matmul(a, b)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, a @ b, rtol=1e-13, atol=1e-13)
    for m, k, n in ((0, 3, 4), (4, 3, 0), (2, 0, 3)):
        assert same_bits(matmul(torch.ones(m, k), torch.ones(k, n)), torch.zeros(m, n))


def canceling(m, k, n, dtype):
    """Return operands whose products sum to zero but for rounding, which shows the order of a sum in every number."""
    draw = Draw(torch.float32, seed=k)
    a, b = draw.normal(m, k // 2), draw.normal(k // 2, n)
    order = draw.permutation(2 * (k // 2))
    return torch.cat((a, a), 1)[:, order].to(dtype), torch.cat((b, -b))[order].to(dtype)


ROW_SHAPES = [(2, 1), (7, 3), (33, 17), (129, 65), (1025, 33), (17, 4100)]


@pytest.mark.smoke
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, *HALF_AND_FLOAT])
@pytest.mark.parametrize(("k", "n"), ROW_SHAPES, ids=str)
def test_rows_of_a_product_do_not_depend_on_the_batch(torch_threads, threads, k, n, dtype):
    a, b = canceling(70, k, n, dtype)
    with torch_threads(1):
        whole = matmul(a, b, out_dtype=dtype)
    with torch_threads(threads):
        assert same_bits(matmul(a, b, out_dtype=dtype), whole), "on another number of threads"
        # All sizes on one thread where that is quick, or those around which libraries switch.
        for m in range(1, 71) if threads == 1 and n < 1000 else (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 63, 64, 65):
            assert same_bits(matmul(a[:m], b, out_dtype=dtype), whole[:m]), f"the first {m} rows"
        for row in (0, 1, 30, 63, 64, 69):
            assert same_bits(matmul(a[row : row + 1], b, out_dtype=dtype), whole[row : row + 1]), f"row {row} alone"
        order = torch.randperm(70)
        assert same_bits(matmul(a[order], b, out_dtype=dtype), whole[order])


@pytest.mark.parametrize("count", [1, 8, 9, 17, 40, 41, 255, 257, 400, 513, 5000])
def test_blocks_hold_all_rows_and_only_the_last_has_fewer(count):
    *full, last = blocks.heights(count)
    assert set(full) | {last} <= set(verified.HEIGHTS)
    assert sum(full) < count <= sum(full) + last
    # No more calls and rows than blocks without zero rows would take.
    calls, rest = 0, count
    for height in verified.HEIGHTS:
        calls, rest = calls + rest // height, rest % height
    greedy = (calls + (rest > 0)) * blocks.CALL + count + -rest % 8
    assert (len(full) + 1) * blocks.CALL + sum(full) + last <= greedy


@pytest.mark.parametrize("dtype", [torch.float64, *HALF_AND_FLOAT])
@pytest.mark.parametrize(("m", "k", "n"), [(67, 35, 19), (64, 32, 48)])
def test_strides_change_no_bit_of_a_product(dtype, m, k, n):
    a, b = canceling(m, k, n, dtype)
    whole = matmul(a, b, out_dtype=dtype)
    for layout in LAYOUTS.values():
        for left, right in ((layout(a), b), (a, layout(b)), (layout(a), layout(b))):
            assert same_bits(matmul(left, right, out_dtype=dtype), whole)


def test_neither_a_neighbor_of_nan_nor_reduced_precision_reaches_a_row():
    draw = Draw(torch.float32)
    a, b = draw.normal(9, 64), draw.normal(64, 16)
    whole, others = matmul(a, b), torch.arange(9) != 3
    spoilt = a.clone()
    spoilt[3] = torch.nan
    assert same_bits(matmul(spoilt, b)[others], whole[others])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert same_bits(matmul(a, b), whole)
    finally:
        torch.set_float32_matmul_precision(before)


def weight_gradient(a, dc, cuts=()):
    out = torch.zeros(a.shape[1], dc.shape[1], dtype=compute_dtype(a.dtype))
    bounds = [0, *cuts, a.shape[0]]
    for low, high in pairwise(bounds):
        assert products.chain_dw(a[low:high], dc[low:high], out) is out
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_chain_dw_is_the_sum_over_rows(dtype):
    draw = Draw(dtype)
    a, dc = draw.normal(77, 19), draw.normal(77, 33)
    terms = a.double().abs().t() @ dc.double().abs()
    error = (weight_gradient(a, dc).double() - a.double().t() @ dc.double()).abs()
    steps = 77 / STEP + 2
    assert (error <= steps * torch.finfo(compute_dtype(dtype)).eps * terms).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chain_dw_may_be_split_at_multiples_of_16_and_extended_by_zeros(torch_threads, dtype, threads):
    draw = Draw(dtype)
    a, dc = draw.normal(77, 19), draw.normal(77, 33)
    with torch_threads(1):
        whole = weight_gradient(a, dc)
    with torch_threads(threads):
        for cuts in ((16,), (32, 48), (64,), (16, 32, 48, 64), (0, 16)):
            assert same_bits(weight_gradient(a, dc, cuts), whole)
        for rows in (1, 3, 16, 40):
            longer = torch.cat((a, draw.normal(rows, 19))), torch.cat((dc, dc.new_zeros(rows, 33)))
            assert same_bits(weight_gradient(*longer), whole)


def test_chain_dw_continues_a_buffer_of_any_strides():
    draw = Draw(torch.float32)
    a, dc, start = draw.normal(40, 19), draw.normal(40, 33), draw.normal(19, 33)
    expected = products.chain_dw(a, dc, start.clone())
    assert not same_bits(expected, start)
    for layout in LAYOUTS.values():
        assert same_bits(products.chain_dw(a, dc, layout(start)), expected)


@pytest.mark.parametrize("layout", ["row by row", "column by column"])
def test_a_tall_gradient_is_finished_slab_by_slab(monkeypatch, layout):
    draw = Draw(torch.float32)
    a, dc, start = draw.normal(40, 300), draw.normal(40, 70), draw.normal(300, 70)
    whole = products.chain_dw(a, dc, start.clone())
    monkeypatch.setattr(products, "SLAB", 128)
    out = start.clone() if layout == "row by row" else start.t().contiguous().t()
    assert same_bits(products.chain_dw(a, dc, out), whole)


# Sizes that are multiples of 16 are not padded, and so reach the library in the layout that they came in.
@pytest.mark.parametrize(("m", "k", "n"), [(40, 19, 33), (32, 48, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strides_change_no_bit_of_a_weight_gradient(dtype, m, k, n):
    draw = Draw(dtype)
    a, dc = draw.normal(m, k), draw.normal(m, n)
    expected = weight_gradient(a, dc)
    for layout in LAYOUTS.values():
        assert same_bits(weight_gradient(layout(a), dc), expected)
        assert same_bits(weight_gradient(a, layout(dc)), expected)


def test_chain_dw_of_no_rows_leaves_the_buffer():
    start = torch.full((3, 4), -0.0)
    assert same_bits(products.chain_dw(torch.ones(0, 3), torch.ones(0, 4), start.clone()), start)


def test_pad_to_appends_zeros():
    x = torch.ones(3, 5)
    for dim, multiple, shape in ((0, 4, (4, 5)), (1, 4, (3, 8)), (-1, 4, (3, 8)), (-2, 2, (4, 5))):
        padded = pad_to(x, dim, multiple)
        assert padded.shape == shape
        assert torch.equal(padded[:3, :5], x)
        assert padded.sum() == 15
    assert pad_to(x, 1, 5) is x


def test_compute_dtype():
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    assert [compute_dtype(dtype) for dtype in dtypes] == [torch.float32] * 3 + [torch.float64]


def test_select_takes_the_column_of_each_id():
    z = torch.arange(12.0).view(3, 4)
    assert select(z, torch.tensor([3, 0, 2])).tolist() == [3, 4, 10]
    assert select(z, torch.tensor([13, 9, 12], dtype=torch.int32), first=10).tolist() == [3, 0, 10]
    assert select(z, torch.tensor([4, -1, 10**9])).tolist() == [0, 0, 0]
    assert outside(torch.tensor([-1, 0, 6, 7]), 7).tolist() == [True, False, False, True]


def test_per_row():
    like = torch.zeros(3, 4)
    assert torch.equal(per_row(torch.tensor([1.0, 2.0, 3.0]), like), torch.tensor([[1.0], [2.0], [3.0]]))
    assert torch.equal(per_row(torch.tensor(2.0), like), torch.full((3, 1), 2.0))
    elsewhere = per_row(torch.tensor(2.0), like.to("meta"))
    assert (elsewhere.shape, elsewhere.device.type, elsewhere.dtype) == ((3, 1), "meta", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_written_gradient_is_the_chain_from_zero_in_each_call_and_thread(dtype):
    draw = Draw(dtype)
    cases = [(draw.normal(40, k), draw.normal(40, n)) for k, n in ((70, 90), (64, 64), (3, 200), (0, 5), (2100, 64))]

    def written(case):
        a, dc = case
        return products.write_dw(a, dc, torch.full((a.shape[1], dc.shape[1]), torch.nan, dtype=dtype))

    with ThreadPoolExecutor(3) as pool:
        for (a, dc), found in zip(cases * 9, pool.map(written, cases * 9), strict=True):
            assert same_bits(found, weight_gradient(a, dc).to(dtype))
