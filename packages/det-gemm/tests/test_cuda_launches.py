"""Launches of the CUDA C++ backend, with PyTorch in place of the kernel; planted bugs show."""

from __future__ import annotations

import importlib
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core.testing import Draw, cuda_gemm, with_layout
from rl_kernels.core.testing.host_tests import CudaHost
from rl_kernels.core.testing.planted import Bug
from rl_kernels.det_gemm.segments import segment_length

SCHEDULE, SEGMENTED, PLAN, HOST = (
    f"rl_kernels.core.cuda.gemm.{name}" for name in ("schedule", "segmented", "plan", "matmul")
)
BACKEND = "rl_kernels.det_gemm.backends.cuda_sm90.backend"
FEW, PROCESSORS = 64, 4
LAYOUTS = ("row", "column", "apart", "odd", "shifted", "expanded")
PLACES = ("cut", "shifted by 4", "spread")
"""Further layouts, beside one that is plain: rows of a larger matrix, an address between, columns far apart."""
PAIRS = [*product(LAYOUTS, repeat=2), *(pair for x in PLACES for pair in ((x, "row"), ("row", x), (x, x)))]
OUT_LAYOUTS = ("row", "column", "apart", "odd", "shifted", "shifted by 4", "cut")
SHAPES = ((5, 200, 64), (200, 40, 72), (70, 136, 24), (1, 8, 8), (64, 72, 40), (3, 5, 7), (65, 1, 1), (9, 8, 0))


def matmul(a, b, out, bias=None, **options):
    importlib.import_module(HOST).Product(a, b, out, bias, **options)(a, b, out, bias)


def laid_out(x, layout):
    if layout == "expanded":
        return x[:1].expand(x.shape)
    if layout.startswith("shifted"):
        first = 4 if layout == "shifted by 4" else 1
        return x.new_full((len(x), x.shape[1] + 8), 1e4)[:, first : first + x.shape[1]].copy_(x)
    if layout == "cut":
        # Single rows too begin at a multiple of 16 bytes that is not 0.
        return x.new_full((len(x) + 8, x.shape[1]), 1e4)[8:].copy_(x)
    if layout == "spread":
        return x.new_full((*x.shape, 8), 1e4)[..., 0].copy_(x)
    return with_layout(x, layout)


def check_layouts(recorder, left, right, out_layout, shapes=SHAPES):
    """Compare products of operands in these layouts with their definition."""
    for place, (m, n, k) in enumerate(shapes):
        draw = Draw((torch.float16, torch.bfloat16)[place % 2], seed=place)
        a, b = laid_out(draw.normal(m, k), left), laid_out(draw.normal(k, n), right)
        bias, start, exact = draw.normal(2 * n)[::2], torch.randn(m, n), a.double() @ b.double()
        for dtype in (draw.dtype, torch.float32):
            out = laid_out(torch.zeros(m, n, dtype=dtype), out_layout)
            matmul(a, b, out, bias=bias)
            assert torch.equal(out, (exact + bias.double()).to(dtype))
        out = laid_out(start.clone(), out_layout)
        matmul(a, b, out, continues=True)
        assert torch.equal(out, (exact + start).float())
    assert {launch["columns"] * launch["rows"] for launch in recorder.launches} == {m * n for m, n, _ in shapes}


def check_schedules(recorder):
    """Check every schedule of the table, on operands of each major, stored in each way."""
    draw = Draw(torch.bfloat16, seed=3)
    for cut in [candidate.schedule for candidate in importlib.import_module(SCHEDULE).candidates()]:
        m, n, k = (min(8, cut.columns), 200, 136) if cut.swapped else (300, 264, 136)
        a, b = draw.normal(m, k), draw.normal(k, n)
        expected = (a.double() @ b.double()).bfloat16()
        for left, right in product((a, with_layout(a, "column")), (b, with_layout(b, "column"))):
            out = torch.zeros(m, n, dtype=torch.bfloat16)
            matmul(left, right, out, schedule=cut)
            assert torch.equal(out, expected)
    # The columns of one row begin at multiples of 16 bytes: its transpose could have a map, its tile has no boxes.
    a, b, out = draw.normal(1, 64), draw.normal(64, 40), torch.zeros(1, 40, 8)[..., 0]
    matmul(a, b, out)
    assert torch.equal(out, (a.double() @ b.double()).float())


def check_segments(recorder):
    """Check every layout and schedule with segments; operands that TMA does not read are copied."""
    backend = importlib.import_module(BACKEND)
    for place, (left, right) in enumerate(PAIRS):
        draw = Draw((torch.float16, torch.bfloat16)[place % 2], seed=place)
        m, n, k = ((5, 200, 96), (200, 40, 264), (9, 8, 0))[place % 3]
        a, b = laid_out(draw.normal(m, k), left), laid_out(draw.normal(k, n), right)
        bias, length = draw.normal(2 * n)[::2], segment_length(k, 4)
        expected = cuda_gemm.product(a, b, 4, length) + bias.float()
        for dtype in (draw.dtype, torch.float32):
            assert torch.equal(backend.segmented(a, b.t(), bias, dtype, 4, length), expected.to(dtype))
    draw = Draw(torch.bfloat16, seed=1)
    for segments in (2, 4, 8):
        for cut in [one.schedule for one in importlib.import_module(SEGMENTED).in_segments(segments)]:
            a, b = draw.normal(min(70, cut.columns) if cut.swapped else 70, 200), draw.normal(200, 136)
            out, length = a.new_zeros(len(a), 136), segment_length(200, segments)
            matmul(a, b, out, schedule=cut, segments=segments, length=length)
            assert torch.equal(out, cuda_gemm.product(a, b, segments, length).to(out.dtype))
    assert {launch.constants["CLUSTER"] for launch in recorder.launches} == {1, 2, 4, 8}
    sizes = {launch["columns"] * launch["rows"] for launch in recorder.launches if launch["length"]}
    assert sizes > {5 * 200, 200 * 40}


def check_dependent_launches(recorder):
    """Few rows begin while the kernel before still runs; the number of rows alone says which are few."""
    draw = Draw(torch.float16, seed=2)
    for m in (1, FEW, FEW + 1):
        matmul(draw.normal(m, 64), draw.normal(64, 200), torch.zeros(m, 200))
    assert [launch.pdl for launch in recorder.launches] == [True, True, False]


def check_weight_gradients(recorder):
    """The backend's own functions transpose the right operands: tokens lie along K."""
    backend, draw = importlib.import_module(BACKEND), Draw(torch.float16, seed=4)
    a, dc, total = draw.normal(50, 40), draw.normal(50, 24), torch.randn(40, 24)
    gold = a.double().t() @ dc.double()
    assert torch.equal(backend.weight_gradient(a, dc, torch.float32), gold.float())
    continued = total.clone()
    backend.weight_gradient_into(a, dc, continued)
    assert torch.equal(continued, (gold + total).float())
    assert torch.equal(backend.forward(a.t(), dc.t(), dc[0], torch.float16), (gold + dc[0].double()).half())
    joined = total.clone()
    backend.joined_into(a, dc, joined, 32)
    parts = [a[rows].double().t() @ dc[rows].double() for rows in (slice(32), slice(32, 50))]
    assert torch.equal(joined, total + parts[0].float() + parts[1].float())


def check_other_addresses(recorder):
    """Prepared launches serve other tensors of their kind; tensor maps are found by address, and bounded in number."""
    host, draw, kept, counts = importlib.import_module(HOST), Draw(torch.bfloat16, seed=5), [], []
    weight, bias = draw.normal(40, 64), draw.normal(80)[::2]
    with patch.object(host, "MOST_MAPS", 5):
        products = {
            count: host.Product(draw.normal(count, 64), weight.t(), torch.zeros(count, 40), bias, segments=2, length=32)
            for count in (5, 200)
        }
        for count, multiply in 9 * list(products.items()):
            # A freed tensor would give its address to another one.
            kept.append((a := draw.normal(count, 64), out := torch.zeros(count, 40)))
            multiply(a, weight.t(), out, bias)
            assert torch.equal(out, cuda_gemm.product(a, weight.t(), 2, 32) + bias.float())
            counts.append(sum(map(len, host._maps.values())))
    assert max(counts) <= 5 + 3
    assert max(counts[4:]) > 1


class TestLaunches(CudaHost):
    modules = (SCHEDULE, SEGMENTED, PLAN, HOST, "rl_kernels.det_gemm.prepared", BACKEND)
    watched = (HOST,)
    bugs = (
        Bug("bias along the other dim of swapped tiles", "BY_ROW + BY_COLUMN - along", "along"),
        Bug("strides of the output exchanged", "strides, *left", "strides[::-1], *left"),
        Bug("one stage too many", "(right), DEEPEST", "(right) + 1, DEEPEST"),
        Bug("chain begins anew", "int(continues)", "0"),
        Bug("every launch begins early", "plan.shared, plan.pdl", "plan.shared, True"),
        Bug("alignment not looked at", "x.data_ptr() % ALIGNED == 0", "True"),
        Bug("maps of all operands in one", "box, x.shape, x.stride(), x", "x"),
        Bug("transposed operand mapped as it is", "if box and is_turned", "if False"),
    )
    stand_ins = {"gemm": partial(cuda_gemm.gemm, processors=PROCESSORS)}
    options = {"processors": PROCESSORS}
    calls = (
        *(check_other_addresses, check_dependent_launches, check_weight_gradients, check_segments, check_schedules),
        *(
            partial(check_layouts, left=left, right=right, out_layout=out)
            for left in LAYOUTS
            for right, out in (("row", "column"), ("column", "shifted by 4"), ("shifted", "row"), ("apart", "odd"))
        ),
    )

    def check(self, call, backend, recorder):
        call(recorder)

    @pytest.mark.parametrize("left", sorted({left for left, _ in PAIRS}))
    def test_launches_of_each_layout(self, left):
        """Half of the shapes for each pair of layouts and layout of the output."""
        for number, ((first, right), out) in enumerate(product(PAIRS, OUT_LAYOUTS)):
            if first == left:
                with self.recording(recorder := self.recorder(None)):
                    check_layouts(recorder, left, right, out, SHAPES[number % 2 :: 2])
