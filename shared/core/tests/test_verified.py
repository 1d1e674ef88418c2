"""Libraries that do not keep a row's bits are found out, and products keep them all the same."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_kernels.core import fp64, products, verified
from rl_kernels.core.calls import forget
from rl_kernels.core.parts import Parts
from rl_kernels.core.rowwise.operands import pad_to
from rl_kernels.core.testing import Draw, bits_of
from rl_kernels.core.verified import Way

TRUE_LIBRARY = verified.library
TILE = torch.Size((verified.TILE_ROWS, verified.TILE_COLUMNS))


def halves(block, right):
    """Return the product as the sum of two: the same but for rounding."""
    half = block.shape[1] // 2
    return TRUE_LIBRARY(block[:, :half], right[:half]) + TRUE_LIBRARY(block[:, half:], right[half:])


def by_rows(block, right):
    return halves(block, right) if len(block) > 64 else None


def by_columns(block, right):
    return halves(block, right) if right.shape[1] % 64 else None


def by_layout(block, right):
    return None if right.stride(0) == 1 else halves(block, right)


def by_place(block, right):
    found = TRUE_LIBRARY(block, right)
    found[-1] = halves(block, right)[-1]
    return found


def by_neighbors(block, right):
    return None if block.isfinite().all() else halves(block, right)


def by_threads(block, right):
    return None if torch.get_num_threads() == 1 else halves(block, right)


def in_bfloat16(block, right):
    return TRUE_LIBRARY(block.bfloat16(), right.bfloat16()).float()


LIBRARIES = {
    by_rows: Way.TILES,
    by_columns: Way.TILES,
    by_layout: Way.TILES,
    by_place: Way.FP64,
    by_neighbors: Way.FP64,
    by_threads: Way.TILES,
    in_bfloat16: Way.FP64,
}


@pytest.fixture
def plant(monkeypatch):
    """Return a function that puts a library in place of PyTorch's; what was tried before is forgotten."""

    def put(library):
        def called(block, right, out=None):
            found = library(block, right)
            found = TRUE_LIBRARY(block, right) if found is None else found
            return found if out is None else out.copy_(found)

        monkeypatch.setattr(verified, "library", called)

    monkeypatch.setattr(verified, "_ways", {})
    verified.tile_of.cache_clear()
    forget()
    yield put
    verified.tile_of.cache_clear()
    forget()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.__name__)
def test_a_library_that_does_not_keep_bits_is_found_out(plant, torch_threads, library):
    draw = Draw(torch.float32)
    a, b = draw.normal(150, 96), draw.normal(96, 100)
    plant(library)
    with torch_threads(1):
        alone = products.matmul(a, b)
    with torch_threads(2):
        whole = products.matmul(a, b)
        assert torch.equal(whole, alone)
        assert verified.counts()[LIBRARIES[library]] > 0
        assert products.note(96, 100, torch.float32, transposed=False) == f"products {LIBRARIES[library].value}"
        for rows in (a[:1], a[:9], a[:64]):
            assert torch.equal(products.matmul(rows, b), whole[: len(rows)])
        order = draw.permutation(150)
        assert torch.equal(products.matmul(a[order], b), whole[order])
        assert torch.equal(products.matmul(a, b.t().contiguous().t()), whole)
        others = a.clone()
        others[::2] = torch.nan
        assert torch.equal(products.matmul(others, b)[1::2], whole[1::2])
    if LIBRARIES[library] is Way.FP64:
        assert torch.equal(whole, fp64.matmul(a, b))


def test_a_kind_is_tried_once(plant):
    # This library keeps bits a block at a time.
    assert products.note(576, 1536, torch.float32) is None
    calls = []
    plant(lambda block, right: calls.append(block.shape))
    a, b = torch.ones(8, 32), torch.ones(32, 64)
    products.matmul(a, b)
    tried = len(calls)
    products.matmul(a, b)
    assert len(calls) == tried + 1


def test_tiles_and_blocks_give_the_same_bits_and_fp64_their_values(monkeypatch):
    draw = Draw(torch.float32)
    a, b = draw.normal(70, 100), draw.normal(100, 90)
    left, dc, start = draw.normal(40, 100), draw.normal(40, 70), draw.normal(100, 70)
    whole, chain = products.matmul(a, b), products.chain_dw(left, dc, start.clone())
    forget()
    monkeypatch.setattr(verified, "way_of", lambda kind: Way.TILES)
    assert torch.equal(bits_of(products.matmul(a, b)), bits_of(whole))
    forget()
    for way in (Way.TILES, Way.FP64):
        monkeypatch.setattr(verified, "way_of_steps", lambda out, settings, way=way: way)
        found = products.chain_dw(left, dc, start.clone())
        torch.testing.assert_close(found, chain, rtol=1e-5, atol=1e-4)
        assert way is Way.FP64 or torch.equal(found, chain)


def by_address(block, right):
    return halves(block, right) if right.data_ptr() % 64 else None


@pytest.mark.parametrize("elements", [4, 8, 15])
def test_a_right_operand_at_another_address_is_another_kind(plant, elements):
    draw = Draw(torch.float32)
    a, b = draw.normal(150, 96), draw.normal(96, 100)
    plant(by_address)
    whole = products.matmul(a, b)
    moved = torch.cat((b.new_zeros(elements), b.flatten()))[elements:].view(b.shape)
    assert torch.equal(products.matmul(a, moved), whole)


@pytest.mark.parametrize("keeps", [True, False])
def test_few_rows_are_one_block_as_low_as_the_library_keeps_their_bits(plant, keeps):
    draw, heights = Draw(torch.float32), []

    def library(block, right):
        heights.append(len(block))
        if len(block) < 8 and not keeps:
            return halves(block, right)
        return TRUE_LIBRARY(pad_to(block, 0, 8), right)[: len(block)]

    plant(library)
    a, b = draw.normal(17, 96), draw.normal(96, 100)
    whole = products.matmul(a, b)
    for count, lowest in ((1, 1), (3, 4), (4, 4), (5, 8), (9, 16)):
        products.matmul(a[:count], b)
        heights.clear()
        assert torch.equal(products.matmul(a[:count], b), whole[:count])
        assert heights == [lowest if keeps else max(lowest, 8)]


def in_other_parts(product, block, right):
    return halves(pad_to(block, 0, product.batch[1]), right)[: product.result[0]]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_few_rows_have_their_bits_where_the_columns_are_cut_into_parts(plant, torch_threads, keeps, transposed):
    draw, counts, true_multiply = Draw(torch.float32), [], Parts.multiply
    a, b = draw.normal(600, 576), draw.normal(576, 192)
    b = b.t().contiguous().t() if transposed else b

    def multiply(product, block, right):
        counts.append(product.result[0])
        return (true_multiply if keeps else in_other_parts)(product, block, right)

    plant(lambda block, right: None)
    with torch_threads(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "multiply", multiply)
        whole = products.matmul(a, b)
        assert not counts
    with torch_threads(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "multiply", multiply)
        for count in (1, 2, 3, 4, 5, 9, 512, 516, 600):
            products.matmul(a[:count], b)
            counts.clear()
            assert torch.equal(products.matmul(a[:count], b), whole[:count])
            out = torch.full((count, 200), torch.nan)
            products.matmul(a[:count], b, out=out[:, :192])
            assert torch.equal(out[:, :192], whole[:count])
            few = count in (1, 2, 3, 4, 516)
            assert counts == [count % 512] * 2 * (keeps and few and torch.backends.mkl.is_available())
        others = a[:2].clone()
        others[1] = torch.nan
        assert torch.equal(products.matmul(others, b)[:1], whole[:1])


def test_few_rows_have_their_bits_in_several_threads_of_python(torch_threads):
    draw = Draw(torch.float32)
    a, b = draw.normal(64, 576), draw.normal(576, 192)
    with torch_threads(2), ThreadPoolExecutor(4) as pool:
        # Each thread of Python has a number of threads of its own.
        rows = pool.map(lambda row: torch.set_num_threads(2) or products.matmul(row, b), a.split(1) * 20)
        assert torch.equal(torch.cat(list(rows)), products.matmul(a, b).repeat(20, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_settings_that_are_switched_in_mid_run_keep_a_rows_bits(dtype):
    draw = Draw(dtype)
    a, b = draw.normal(70, 100), draw.normal(100, 90)
    before = torch.backends.mkldnn.enabled
    try:
        for enabled in (True, False):
            torch.backends.mkldnn.enabled = enabled
            whole = products.matmul(a, b, out_dtype=dtype)
            assert torch.equal(products.matmul(a[:1], b, out_dtype=dtype), whole[:1])
            assert torch.backends.mkldnn.enabled is enabled
    finally:
        torch.backends.mkldnn.enabled = before
