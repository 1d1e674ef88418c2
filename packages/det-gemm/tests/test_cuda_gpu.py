"""The CUDA C++ backend on a GPU: every bit of it, by a kernel of a few lines: one warp, mma.sync, 16 terms a step."""

import random
from itertools import pairwise

import pytest
import torch

from rl_kernels.core.cuda.gemm.matmul import Product
from rl_kernels.core.cuda.gemm.schedule import Schedule, candidates
from rl_kernels.core.cuda.gemm.segmented import in_segments
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.distributed import tree_sum
from rl_kernels.core.testing import Draw, with_layout
from rl_kernels.det_gemm import det_gemm, det_gemm_dw, det_linear
from rl_kernels.det_gemm.segments import bounds, segment_length
from rl_kernels.lab.check.compare import bits

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
TABLE = [candidate.schedule for candidate in candidates()]
LAYOUTS = ("row", "column", "apart", "odd")
ALIGNED = [("row", "column"), ("row", "row"), ("column", "row"), ("column", "column")]
BACKEND = "cuda-sm90"


@pytest.fixture(scope="module", autouse=True)
def hopper():
    if torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] != 9:
        pytest.skip("needs sm_90")


CHAIN = """
#include <rl_kernels/number.cuh>
using namespace rlk;
#if DTYPE == 1
#define NAME "bf16"
#else
#define NAME "f16"
#endif
struct Operand { const unsigned short* at; long long row, inner; int rows; };
__device__ u32 pair(const Operand& x, int row, int k, int inner) {
    u32 word = 0;
    for (int i = 0; i < 2; ++i)
        if (row < x.rows && k + i < inner) word |= (u32)x.at[row * x.row + (k + i) * x.inner] << 16 * i;
    return word;
}
// One warp has 16 rows and 8 columns; lane l the rows l / 4 and 8 more, the columns from 2 (l % 4).
extern "C" __global__ void chain(const unsigned short* a, const unsigned short* b, float* c, long long a_row,
                                 long long a_inner, long long b_row, long long b_inner, int m, int n, int inner) {
    const Operand left = {a, a_row, a_inner, m}, right = {b, b_row, b_inner, n};
    const int row = blockIdx.x * 16 + threadIdx.x / 4, column = blockIdx.y * 8, l = threadIdx.x % 4 * 2;
    float d[4];
    for (int i = 0; i < 4; ++i) {
        const int r = row + i / 2 * 8, s = column + l + i % 2;
        d[i] = r < m && s < n ? c[(long long)r * n + s] : 0.0f;
    }
    for (int k = 0; k < inner; k += 16) {
        const u32 x[4] = {pair(left, row, k + l, inner), pair(left, row + 8, k + l, inner),
                          pair(left, row, k + l + 8, inner), pair(left, row + 8, k + l + 8, inner)};
        const int other = column + threadIdx.x / 4;
        const u32 y[2] = {pair(right, other, k + l, inner), pair(right, other, k + l + 8, inner)};
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                     "{%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    }
    for (int i = 0; i < 4; ++i) {
        const int r = row + i / 2 * 8, s = column + l + i % 2;
        if (r < m && s < n) c[(long long)r * n + s] = d[i];
    }
}
"""


@pytest.fixture(scope="module")
def chained(tmp_path_factory):
    """Return ``chained(a, b, start)``, the product by the plain chain in FP32."""
    folder = tmp_path_factory.mktemp("plain") / "plain_chain"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "chain.cu").write_text(CHAIN)

    def product(a, b, start=None):
        (m, k), n = a.shape, b.shape[1]
        out = torch.zeros(m, n, device="cuda") if start is None else start.clone(memory_format=torch.contiguous_format)
        program = Program("plain_chain", "chain.cu", "sm_90a", (("DTYPE", 1 + HALVES.index(a.dtype)),))
        strides = (*a.stride(), *b.t().stride())
        kernel(program, "chain", "PPPqqqqiii", a.device).launch(
            (-(-m // 16), -(-n // 8)), 32, a, b, out, *strides, m, n, k
        )
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder.parent)
        yield product


def operands(m, n, k, dtype, layouts=("row", "column"), wide=False):
    draw = Draw(dtype, "cuda", seed=m + n + k)
    values = draw.normal(m, k, dtype=torch.float64), draw.normal(k, n, dtype=torch.float64)
    return [with_layout((x**5 if wide else x).to(dtype), layout) for x, layout in zip(values, layouts, strict=True)]


def product(a, b, schedule=None, out=None, **options):
    out = a.new_full((a.shape[0], b.shape[1]), torch.nan, dtype=torch.float32) if out is None else out
    bias = options.pop("bias", None)
    Product(a, b, out, bias, schedule=schedule, **options)(a, b, out, bias)
    return out


@pytest.mark.parametrize("layouts", ALIGNED, ids=str)
@pytest.mark.parametrize("cut", TABLE, ids=str)
def test_tiles_match_the_plain_chain(chained, cut, layouts):
    for m, n, k in ((200, 328, 520), (72, 2600, 72)):
        m = min(m, cut.columns) if cut.swapped else m
        a, b = operands(m, n, k, torch.bfloat16, layouts, wide=k > 100)
        assert bits(product(a, b, cut), chained(a, b)).passed


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layouts", [(a, b) for a in LAYOUTS for b in LAYOUTS], ids=str)
def test_layouts_match_the_plain_chain(chained, layouts, dtype):
    for m, n, k in ((7, 13, 37), (65, 200, 72), (1, 136, 4104)):
        a, b = operands(m, n, k, dtype, layouts)
        assert bits(product(a, b), chained(a, b)).passed


@pytest.mark.parametrize(
    "cut", [Schedule(128, 256), Schedule(64, 256, turns=True), Schedule(16, 8, 256, swapped=True)], ids=str
)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", ["row", "column", "apart", "odd"])
def test_outputs_of_any_dtype_and_strides(chained, layout, dtype, cut):
    a, b = operands(8 if cut.swapped else 136, 1000, 264, dtype)
    bias = Draw(dtype, "cuda", seed=5).normal(1000)
    expected = chained(a, b) + bias.float()
    for out_dtype in (torch.float32, *HALVES):
        out = with_layout(torch.full_like(expected, torch.nan, dtype=out_dtype), layout)
        assert bits(product(a, b, cut, out, bias=bias).contiguous(), expected.to(out_dtype)).passed


def test_dependent_launches_wait_for_what_they_read():
    x, weight = operands(8, 1024, 1024, torch.bfloat16)
    weight = weight / 32
    dependent, independent = Schedule(64, 8, 256, swapped=True), Schedule(128, 256)

    def chain(*schedules):
        value, values = x, []
        for schedule in schedules * (40 // len(schedules)):
            values.append(product(value, weight, schedule, torch.empty_like(value)))
            value = values[-1]
        return torch.stack(values)

    expected = chain(independent)
    assert bits(chain(dependent), expected).passed
    assert bits(chain(independent, dependent), expected).passed


@pytest.mark.parametrize("parts", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("layout", ["row", "column", "apart"])
def test_continued_weight_gradients_match_the_plain_chain(chained, layout, parts):
    for k, n, tokens in ((512, 768, 1024), (136, 2056, 1024 + 7)):
        x, dc = operands(k, n, tokens, torch.bfloat16, ("column", "row"))
        start = torch.randn(k, n, device="cuda")
        buffer, cuts = with_layout(start.clone(), layout), [*range(0, 1024, 1024 // parts), tokens]
        for first, last in pairwise(cuts):
            det_gemm_dw(x.t()[first:last], dc[first:last], accumulate_into=buffer, backend=BACKEND)
        assert bits(buffer.contiguous(), chained(x, dc, start)).passed
        assert bits(det_gemm_dw(x.t(), dc, out_dtype=torch.float32, backend=BACKEND), chained(x, dc)).passed


@pytest.mark.parametrize("cut", [Schedule(128, 128), Schedule(64, 256, turns=True)], ids=str)
def test_signs_of_zeros_match_the_plain_chain(chained, cut):
    a, b = operands(136, 264, 80, torch.bfloat16)
    a[::2], b[:, ::3] = 0.0, -0.0
    start = torch.randn(136, 264, device="cuda")
    start[::4], start[1::4] = -0.0, 0.0
    assert bits(product(a, b, cut), chained(a, b)).passed
    assert bits(product(a, b, cut, start.clone(), continues=True), chained(a, b, start)).passed
    assert bits(product(a[:, :0], b[:0], cut, start.clone(), continues=True), start).passed
    assert not bool(product(a[:, :0], b[:0], cut).any())


def segmented(chained, a, b, bias, out_dtype, segments):
    """Return the tree of the plain chains of the segments."""
    parts = [chained(a[:, f:e], b[f:e]) for f, e in bounds(a.shape[1], segments, segment_length(a.shape[1], segments))]
    total = tree_sum(parts)
    return (total if bias is None else total + bias.float()).to(out_dtype)


@pytest.mark.parametrize("segments", [2, 4, 8])
@pytest.mark.parametrize("layouts", [("row", "column"), ("row", "row")], ids=str)
def test_segmented_tiles_match_the_tree_of_chains(chained, layouts, segments):
    for candidate in in_segments(segments):
        cut = candidate.schedule
        for m, n, k in ((200, 328, 1040), (72, 1288, 2056)):
            m = min(m, cut.columns) if cut.swapped else m
            a, b = operands(m, n, k, torch.bfloat16, layouts, wide=True)
            majors = (0, int(layouts[1] == "row"))
            left, right = majors[::-1] if cut.swapped else majors
            if cut.fitted(left, right) != cut or cut.depth(right) < 3:
                continue
            out, length = torch.empty(m, n, device="cuda"), segment_length(k, segments)
            found = product(a, b, cut, out, segments=segments, length=length)
            assert bits(found, segmented(chained, a, b, None, torch.float32, segments)).passed, cut


@pytest.mark.parametrize("segments", [2, 8])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layouts", [(a, b) for a in LAYOUTS for b in LAYOUTS], ids=str)
def test_segmented_layouts_match_the_tree_of_chains(chained, layouts, dtype, segments):
    for m, n, k in ((7, 136, 1000), (65, 200, 72), (1, 136, 4104), (130, 264, 24)):
        a, b = operands(m, n, k, dtype, layouts)
        bias = Draw(dtype, "cuda", seed=6).normal(n)
        for out_dtype in (dtype, torch.float32):
            found = det_gemm(a, b, k_segments=segments, out_dtype=out_dtype, backend=BACKEND)
            assert bits(found, segmented(chained, a, b, None, out_dtype, segments)).passed
        if layouts[1] != "row":
            found = det_linear(a, b.t(), bias, k_segments=segments, backend=BACKEND)
            assert bits(found, segmented(chained, a, b, bias, dtype, segments)).passed


def test_a_thousand_shapes(chained):
    draw = random.Random(7)
    for number in range(1000):
        few = draw.random() < 0.5
        m = draw.randint(1, 64) if few else draw.randint(65, 700)
        n, k = (8 * draw.randint(1, 200) for _ in range(2))
        # Operands that no copy reads are compiled apart, so there are fewer of them.
        layouts = ("odd", "odd") if number % 20 == 0 else ALIGNED[number % 2] if m % 8 else draw.choice(ALIGNED)
        a, b = operands(m, n, k, torch.bfloat16, layouts)
        assert bits(product(a, b), chained(a, b)).passed, (m, n, k, layouts)
