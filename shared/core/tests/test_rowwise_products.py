from itertools import pairwise

import pytest
import torch

from rl_kernels.core import rowwise
from rl_kernels.core.testing import Draw, bits_of

ULP = 2.0**-23


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


LAYOUTS = {
    "column by column": lambda x: x.t().contiguous().t(),
    "every other element": spread,
    "off by one": off_by_one,
}


PRODUCTS = {"matmul": rowwise.matmul, "linear": lambda a, b: rowwise.linear(a, b.t())}
both_products = pytest.mark.parametrize("matmul", PRODUCTS.values(), ids=list(PRODUCTS))


@both_products
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 5), (64, 64, 64), (65, 129, 33), (2, 31, 4099)], ids=str)
def test_product_is_that_of_fp64_rounded_once(matmul, dtype, shape):
    m, k, n = shape
    draw = Draw(dtype)
    a, b = draw.normal(m, k), draw.normal(k, n)
    out = matmul(a, b)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=ULP, atol=1e-12)


def test_matmul_of_fp64_stays_there():
    draw = Draw(torch.float64)
    a, b = draw.normal(5, 77), draw.normal(77, 9)
    out = rowwise.matmul(a, b)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, a @ b, rtol=1e-13, atol=1e-13)


@both_products
@pytest.mark.parametrize("shape", [(0, 3, 4), (4, 3, 0), (2, 0, 3)], ids=str)
def test_product_of_empty_operands(matmul, shape):
    m, k, n = shape
    out = matmul(torch.ones(m, k), torch.ones(k, n))
    assert same_bits(out, torch.zeros(m, n))


# FP64 shows what rounding to FP32 would nearly always hide: the order of a sum.
ROW_SHAPES = [(k, n, torch.float64) for k, n in ((1, 1), (7, 3), (33, 17), (129, 65), (1025, 33), (17, 4100))]


@both_products
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("k", "n", "dtype"), [*ROW_SHAPES, (33, 17, torch.float32), (65, 31, torch.bfloat16)], ids=str)
def test_rows_of_a_product_do_not_depend_on_the_batch(matmul, torch_threads, threads, k, n, dtype):
    draw = Draw(dtype, seed=k)
    a, b = draw.normal(70, k), draw.normal(k, n)
    with torch_threads(threads):
        whole = matmul(a, b)
        # Two threads wait for each other busily, so they get the sizes around which libraries switch.
        for m in range(1, 71) if threads == 1 else (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 63, 64, 65):
            assert same_bits(matmul(a[:m], b), whole[:m]), f"the first {m} rows"
        for row in (0, 1, 30, 63, 64, 69):
            assert same_bits(matmul(a[row : row + 1], b), whole[row : row + 1]), f"row {row} alone"
        order = draw.permutation(70)
        assert same_bits(matmul(a[order], b), whole[order])


def test_a_neighbour_of_nan_leaves_a_row_alone():
    draw = Draw(torch.float32)
    a, b = draw.normal(9, 33), draw.normal(33, 7)
    whole = rowwise.matmul(a, b)
    a[3] = torch.nan
    others = torch.arange(9) != 3
    assert same_bits(rowwise.matmul(a, b)[others], whole[others])


@both_products
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("m", "k", "n"), [(67, 35, 19), (64, 32, 48)])
def test_strides_change_no_bit_of_a_product(matmul, layout, dtype, m, k, n):
    draw = Draw(dtype)
    a, b = draw.normal(m, k), draw.normal(k, n)
    whole = matmul(a, b)
    assert same_bits(matmul(layout(a), b), whole)
    assert same_bits(matmul(a, layout(b)), whole)
    assert same_bits(matmul(layout(a), layout(b)), whole)


def test_reduced_precision_of_fp32_products_does_not_reach_them():
    draw = Draw(torch.float32)
    a, b = draw.normal(5, 64), draw.normal(64, 16)
    whole = rowwise.matmul(a, b)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert same_bits(rowwise.matmul(a, b), whole)
    finally:
        torch.set_float32_matmul_precision(before)


def weight_gradient(a, dc, cuts=()):
    out = torch.zeros(a.shape[1], dc.shape[1], dtype=rowwise.compute_dtype(a.dtype))
    bounds = [0, *cuts, a.shape[0]]
    for low, high in pairwise(bounds):
        assert rowwise.chain_dw(a[low:high], dc[low:high], out) is out
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_chain_dw_is_the_sum_over_rows(dtype):
    draw = Draw(dtype)
    a, dc = draw.normal(77, 19), draw.normal(77, 33)
    terms = a.double().abs().t() @ dc.double().abs()
    error = (weight_gradient(a, dc).double() - a.double().t() @ dc.double()).abs()
    steps = 77 / rowwise.STEP + 2
    assert (error <= steps * torch.finfo(rowwise.compute_dtype(dtype)).eps * terms).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cuts", [(16,), (32, 48), (64,), (16, 32, 48, 64), (0, 16)], ids=str)
def test_chain_dw_may_be_split_at_multiples_of_16(torch_threads, threads, cuts):
    draw = Draw(torch.float64)
    a, dc = draw.normal(77, 19), draw.normal(77, 33)
    with torch_threads(threads):
        assert same_bits(weight_gradient(a, dc, cuts), weight_gradient(a, dc))


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_chain_dw_is_not_changed_by_zero_rows_at_the_end(rows):
    draw = Draw(torch.float32)
    a, dc = draw.normal(77, 19), draw.normal(77, 33)
    longer = weight_gradient(torch.cat((a, draw.normal(rows, 19))), torch.cat((dc, torch.zeros(rows, 33))))
    assert same_bits(longer, weight_gradient(a, dc))


def test_chain_dw_continues_a_buffer_of_any_strides():
    draw = Draw(torch.float32)
    a, dc, start = draw.normal(40, 19), draw.normal(40, 33), draw.normal(19, 33)
    expected = rowwise.chain_dw(a, dc, start.clone())
    assert not same_bits(expected, start)
    for layout in LAYOUTS.values():
        assert same_bits(rowwise.chain_dw(a, dc, layout(start)), expected)


# Sizes that are multiples of 16 are not padded, and so reach the library in the layout that they came in.
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize(("m", "k", "n"), [(40, 19, 33), (32, 48, 64)])
def test_strides_change_no_bit_of_a_weight_gradient(layout, m, k, n):
    draw = Draw(torch.float64)
    a, dc = draw.normal(m, k), draw.normal(m, n)
    expected = weight_gradient(a, dc)
    assert same_bits(weight_gradient(layout(a), dc), expected)
    assert same_bits(weight_gradient(a, layout(dc)), expected)


def test_chain_dw_of_no_rows_leaves_the_buffer():
    start = torch.full((3, 4), -0.0)
    assert same_bits(rowwise.chain_dw(torch.ones(0, 3), torch.ones(0, 4), start.clone()), start)


@pytest.mark.parametrize(
    ("dim", "multiple", "shape"), [(0, 4, (4, 5)), (1, 4, (3, 8)), (-1, 4, (3, 8)), (-2, 2, (4, 5))]
)
def test_pad_to_appends_zeros(dim, multiple, shape):
    x = torch.ones(3, 5)
    padded = rowwise.pad_to(x, dim, multiple)
    assert padded.shape == shape
    assert torch.equal(padded[:3, :5], x)
    assert padded.sum() == 15


def test_pad_to_gives_back_what_needs_no_padding():
    x = torch.ones(3, 5)
    assert rowwise.pad_to(x, 1, 5) is x


def test_compute_dtype():
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    assert [rowwise.compute_dtype(dtype) for dtype in dtypes] == [torch.float32] * 3 + [torch.float64]
