"""The host side of the CUDA C++ backend, with a kernel that a few lines of PyTorch stand for; planted bugs show."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch

from rl_kernels.core.testing import Draw, lying
from rl_kernels.core.testing.cuda_gemm import gemm, product
from rl_kernels.core.testing.launches import Recorder
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.det_gemm.segments import segment_length

MODULES = (
    *(f"rl_kernels.core.cuda.gemm.{name}" for name in ("schedule", "segmented", "matmul")),
    "rl_kernels.det_gemm.backends.cuda_sm90.backend",
)
BUGS = (
    Bug("bias along the other dim of swapped tiles", "BY_ROW + BY_COLUMN - along", "along"),
    Bug("strides of the output exchanged", "strides, *left", "strides[::-1], *left"),
    Bug("one stage too many", "(right), DEEPEST", "(right) + 1, DEEPEST"),
    Bug("chain begins anew", "int(continues)", "0"),
    Bug("every launch begins early", "pdl=plan.pdl", "pdl=True"),
    Bug("alignment left out of what a launch follows", "a.data_ptr() % ALIGNED == 0", "True"),
)
HOST = "rl_kernels.core.cuda.gemm.matmul"
BACKEND = "rl_kernels.det_gemm.backends.cuda_sm90.backend"
SCHEDULE, SEGMENTED = (f"rl_kernels.core.cuda.gemm.{name}" for name in ("schedule", "segmented"))
FAILURES = (AssertionError, RuntimeError)
FEW, PROCESSORS = 64, 4
STAND_INS = {"gemm": partial(gemm, processors=PROCESSORS)}
LAYOUTS = ("row", "column", "apart", "odd", "shifted", "expanded")
PLACES = ("cut", "shifted by 4", "spread")
"""Further layouts, beside one that is plain: rows of a larger matrix, an address between, columns far apart."""
PAIRS = [(a, b) for a in LAYOUTS for b in LAYOUTS] + [pair for x in PLACES for pair in ((x, "row"), ("row", x), (x, x))]
SHAPES = ((5, 200, 64), (200, 40, 72), (70, 136, 24), (1, 8, 8), (64, 72, 40), (3, 5, 7), (65, 1, 1), (9, 8, 0))


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
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
    return lying(x, layout)


def hold(layouts: tuple[str, str], out_layout: str) -> None:
    """Hold products of operands that lie like this to their definition."""
    module = importlib.import_module(HOST)
    recorder = Recorder(STAND_INS, processors=PROCESSORS)
    with recorder.watching(HOST):
        for place, (m, n, k) in enumerate(SHAPES):
            draw = Draw((torch.float16, torch.bfloat16)[place % 2], seed=place)
            a, b = laid_out(draw.normal(m, k), layouts[0]), laid_out(draw.normal(k, n), layouts[1])
            bias, start, product = draw.normal(2 * n)[::2], torch.randn(m, n), a.double() @ b.double()
            for dtype in (draw.dtype, torch.float32):
                out = laid_out(torch.zeros(m, n, dtype=dtype), out_layout)
                module.matmul(a, b, out, bias=bias)
                assert torch.equal(out, (product + bias.double()).to(dtype))
            out = laid_out(start.clone(), out_layout)
            module.matmul(a, b, out, continues=True)
            assert torch.equal(out, (product + start).float())
        assert {launch["columns"] * launch["rows"] for launch in recorder.launches} == {m * n for m, n, _ in SHAPES}


def hold_schedules() -> None:
    """Every schedule of the table, on operands of each major, stored in each way."""
    module = importlib.import_module(HOST)
    schedules = [candidate.schedule for candidate in importlib.import_module(SCHEDULE).candidates()]
    with Recorder(STAND_INS, processors=PROCESSORS).watching(HOST):
        draw = Draw(torch.bfloat16, seed=3)
        for cut in schedules:
            m, n, k = (min(8, cut.columns), 200, 136) if cut.swapped else (300, 264, 136)
            a, b = draw.normal(m, k), draw.normal(k, n)
            product = a.double() @ b.double()
            for left in (a, lying(a, "column")):
                for right in (b, lying(b, "column")):
                    out = torch.zeros(m, n, dtype=torch.bfloat16)
                    module.matmul(left, right, out, schedule=cut)
                    assert torch.equal(out, product.bfloat16())


def hold_spread_output() -> None:
    """One row whose columns begin at multiples of 16 bytes: its transpose could have a map, its tile has no boxes."""
    draw = Draw(torch.bfloat16, seed=5)
    with Recorder(STAND_INS, processors=PROCESSORS).watching(HOST):
        a, b, out = draw.normal(1, 64), draw.normal(64, 40), torch.zeros(1, 40, 8)[..., 0]
        importlib.import_module(HOST).matmul(a, b, out)
        assert torch.equal(out, (a.double() @ b.double()).float())


def hold_segments() -> None:
    """Every layout and schedule with segments; what TMA does not take is left to other launches."""
    module, backend = importlib.import_module(HOST), importlib.import_module(BACKEND)
    recorder = Recorder(STAND_INS, processors=PROCESSORS)
    with recorder.watching(HOST):
        for place, (left, right) in enumerate(PAIRS):
            draw = Draw((torch.float16, torch.bfloat16)[place % 2], seed=place)
            m, n, k = ((5, 200, 96), (200, 40, 264), (9, 8, 0))[place % 3]
            a, b = laid_out(draw.normal(m, k), left), laid_out(draw.normal(k, n), right)
            bias, length = draw.normal(2 * n)[::2], segment_length(k, 4)
            expected = product(a, b, 4, length) + bias.float()
            for dtype in (draw.dtype, torch.float32):
                assert torch.equal(backend.segmented(a, b, bias, dtype, 4, length), expected.to(dtype))
        draw = Draw(torch.bfloat16, seed=1)
        for segments in (2, 4, 8):
            for one in importlib.import_module(SEGMENTED).in_segments(segments):
                cut = one.schedule
                a, b = draw.normal(min(70, cut.columns) if cut.swapped else 70, 200), draw.normal(200, 136)
                out, length = a.new_zeros(len(a), 136), segment_length(200, segments)
                assert module.matmul(a, b, out, schedule=cut, segments=segments, length=length)
                assert torch.equal(out, product(a, b, segments, length).to(out.dtype))
    assert {launch.constants["CLUSTER"] for launch in recorder.launches} == {1, 2, 4, 8}
    assert {launch["columns"] * launch["rows"] for launch in recorder.launches if launch["length"]} > {
        5 * 200,
        200 * 40,
    }


def hold_dependent_launches() -> None:
    """Few rows begin while the kernel before still runs; the number of rows alone says which are few."""
    recorder, draw = Recorder(STAND_INS, processors=PROCESSORS), Draw(torch.float16, seed=2)
    with recorder.watching(HOST):
        for m in (1, FEW, FEW + 1):
            out = torch.zeros(m, 200)
            importlib.import_module(HOST).matmul(draw.normal(m, 64), draw.normal(64, 200), out)
    assert [launch.pdl for launch in recorder.launches] == [True, True, False]


def hold_weight_gradients() -> None:
    """The backend's own functions: what of the operands is transposed."""
    backend = importlib.import_module("rl_kernels.det_gemm.backends.cuda_sm90.backend")
    draw = Draw(torch.float16, seed=4)
    with Recorder(STAND_INS, processors=PROCESSORS).watching(HOST):
        a, dc, total = draw.normal(50, 40), draw.normal(50, 24), torch.randn(40, 24)
        gold = a.double().t() @ dc.double()
        assert torch.equal(backend.weight_gradient(a, dc, torch.float32), gold.float())
        continued = total.clone()
        backend.weight_gradient_into(a, dc, continued)
        assert torch.equal(continued, (gold + total).float())
        assert torch.equal(backend.forward(a.t(), dc, dc[0], torch.float16), (gold + dc[0].double()).half())


def hold_all() -> None:
    for place, left in enumerate(LAYOUTS):
        for right in LAYOUTS[place % 2 :: 2]:
            for out in ("row", "column", "apart", "odd", "shifted by 4"):
                hold((left, right), out)
    for pair in PAIRS[len(LAYOUTS) ** 2 :]:
        hold(pair, "row")
    hold_schedules()
    hold_spread_output()
    hold_segments()
    hold_dependent_launches()
    hold_weight_gradients()


@pytest.mark.parametrize("out_layout", ["row", "column", "apart", "odd", "shifted", "shifted by 4", "cut"])
@pytest.mark.parametrize("layouts", PAIRS, ids=str)
def test_operands_are_launched_as_they_lie(layouts: tuple[str, str], out_layout: str) -> None:
    hold(layouts, out_layout)


def test_schedules_are_launched_as_they_are_compiled() -> None:
    hold_schedules()
    hold_spread_output()


def test_segments_are_launched_as_the_operands_lie() -> None:
    hold_segments()


def test_weight_gradients_are_launched_with_the_tokens_along_k() -> None:
    hold_weight_gradients()


def test_plans_that_are_kept_are_bounded() -> None:
    assert importlib.import_module(HOST).plan_of.cache_info().maxsize == 4096


def test_products_of_few_rows_are_dependent_launches() -> None:
    hold_dependent_launches()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_planted_in_the_host_code_shows_in_the_launches(bug: Bug) -> None:
    with planted(MODULES, bug), pytest.raises(FAILURES):
        hold_all()
