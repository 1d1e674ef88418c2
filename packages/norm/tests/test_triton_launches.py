"""What the Triton backend launches, recorded without a GPU and held to what the shapes imply; planted bugs show."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch

from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.triton_launches import TritonRecorder

BACKEND = "rl_kernels.norm.backends.triton.backend"
FEW = 32
FAILURES = (AssertionError, RuntimeError)
EPS, OFFSET = 1e-5, 0.5

BUGS = (
    Bug("a program short", "ceil_div(count, rows)", "count // rows"),
    Bug("buffer's stride ignored", "out.stride(0)", "1"),
    Bug("alignment not looked at", "() and x.data_ptr() % ALIGNED == 0", "()"),
)


class Given(NamedTuple):
    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    grad: torch.Tensor
    centred: bool = False
    cast_first: bool = True


def made(rows, size, dtype=torch.bfloat16, *, residual=False, weight=torch.bfloat16, bias=False, **form):
    x, other, grad = (torch.randn(rows, size).to(dtype) for _ in range(3))
    scale = None if weight is None else torch.rand(size).to(weight)
    return Given(x, other if residual else None, scale, torch.randn(size).to(dtype) if bias else None, grad, **form)


def lying_apart():
    """Rows with a gap between them, columns of a transposed matrix, and a weight at an odd address."""
    given = made(33, 96, residual=True)
    wide = torch.randn(33, 100).bfloat16()
    weight = torch.rand(97).bfloat16()[1:]
    return given._replace(x=wide[:, 4:], residual=torch.randn(96, 33).bfloat16().t(), weight=weight)


CALLS = {
    "llama": partial(made, 37, 4096),
    "heads": partial(made, 1000, 128),
    "many": partial(made, 4097, 40),
    "wide-added": partial(made, 5, 8192, residual=True),
    "many-wide": partial(made, 513, 1025, residual=True),
    "wide-fp32": partial(made, 2, 16384, torch.float32, residual=True, weight=torch.float32),
    "added": partial(made, 5, 2048, residual=True),
    "odd": partial(made, 16, 77, torch.float32, weight=torch.float32),
    "layer": partial(made, 33, 768, bias=True, residual=True, centred=True, cast_first=False),
    "mixed": partial(made, 3, 64, weight=torch.float32),
    "no-weight": partial(made, 2, 40, weight=None),
    "one-column": partial(made, 3, 1),
    "widest": partial(made, 1, 16384),
    "apart": lying_apart,
}


def tile_of(size):
    """Return columns, rows, those of a step and warps as D alone has them."""
    width = 1 << max(size - 1, 1).bit_length()
    rows = min(max(2048 // width, 1), 16)
    return width, rows, min(max(16384 // width, 16), 128), min(max(width * rows // 512, 1), 16)


def check_rows(launch, **expected):
    """Rows are the same numbers, in one piece and at addresses for wide loads."""
    for name, tensor in expected.items():
        found = launch[name]
        if tensor is None:
            assert found is None, name
        else:
            assert found is not None, name
            assert torch.equal(found, tensor), name
            assert found.is_contiguous(), name
            assert found.data_ptr() % 16 == 0, name


def check_tile(launch, given):
    width, rows, step, warps = tile_of(given.x.shape[1])
    assert (launch["D"], launch["WIDTH"], launch["ROWS"]) == (given.x.shape[1], width, rows)
    assert launch.options["num_warps"] == warps
    assert (launch["count"], launch["offset"], launch["CENTRED"]) == (len(given.x), OFFSET, given.centred)
    return rows, step


def check_forward(given, launch, output, total, stats):
    rows, _ = check_tile(launch, given)
    assert launch.grid == (-(-len(given.x) // rows), 1, 1)
    check_rows(launch, X=given.x, RESIDUAL=given.residual, WEIGHT=given.weight, BIAS=given.bias)
    assert (launch["Y"] is output, launch["SUM"] is total, launch["STATS"] is stats) == (True, True, True)
    assert (launch["eps"], launch["CAST_FIRST"]) == (EPS, given.cast_first)
    assert output.shape == given.x.shape
    assert (stats.shape, stats.dtype) == ((2, len(given.x)), torch.float32)


def check_backward(given, launches, dx, stats, sums):
    launch, *chains = launches
    rows, step = check_tile(launch, given)
    count, size = given.x.shape
    per = rows if count <= FEW * step else step
    programs = -(-count // per)
    assert launch.grid == (programs, 1, 1)
    assert launch["PER"] == per
    width, read = given.x.element_size(), 2 if given.residual is None else 3
    assert launch["STAGES"] == (3 if 2 * read * width * rows * launch["WIDTH"] <= 1 << 16 else 1)
    check_rows(launch, GRAD=given.grad, GRAD_SUM=given.residual, X=given.x, WEIGHT=given.weight)
    assert launch["STATS"] is stats
    assert launch["DX"] is dx
    for name, (out, is_continued) in sums.items():
        parts = launch[f"PARTS_{name}"]
        if out is None:
            assert parts is None
            continue
        chain = chains.pop(0)
        assert chain["PARTS"] is parts
        assert (parts.shape, parts.dtype) == ((programs, size), torch.float32)
        assert (chain["OUT"].data_ptr(), chain["stride"]) == (out.data_ptr(), out.stride(0))
        assert (chain["count"], chain["D"], chain["CONTINUED"]) == (programs, size, is_continued)
        assert chain["INNER"] == step // per
        assert chain["AHEAD"] % chain["INNER"] == 0
        assert chain.grid == (-(-size // chain["COLUMNS"]), 1, 1)
    assert not chains


def check(name, plant=nullcontext):
    given = CALLS[name]()
    form = (given.weight, given.bias, EPS, given.centred, OFFSET, given.cast_first)
    with TritonRecorder().pretended() as recorder, plant():
        backend = importlib.import_module(BACKEND)
        if given.residual is None:
            total, (output, stats) = None, backend.forward(given.x, *form)
        else:
            output, total, stats = backend.forward_sum(given.x, given.residual, *form)
        check_forward(given, recorder.launches[0], output, total, stats)
        assert len(recorder.launches) == 1
        given_back = (given.grad, given.residual, given.x, given.weight, stats, given.centred, OFFSET)
        for needs_weight, needs_bias in ((True, True), (True, False), (False, False)):
            recorder.launches.clear()
            dx, dweight, dbias = backend.backward(*given_back, needs_weight, needs_bias)
            sums = {
                "WEIGHT": (dweight if needs_weight else None, False),
                "BIAS": (dbias if needs_bias else None, False),
            }
            check_backward(given, recorder.launches, dx, stats, sums)
        recorder.launches.clear()
        buffer = torch.zeros(given.x.shape[1], 3)[:, 1]
        dx, dbias = backend.backward_into(*given_back, buffer, True)
        check_backward(given, recorder.launches, dx, stats, {"WEIGHT": (buffer, True), "BIAS": (dbias, False)})


@pytest.mark.parametrize("name", CALLS)
def test_launches(name):
    check(name)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_show(bug):
    for name in CALLS:
        try:
            check(name, partial(planted, [BACKEND], bug))
        except FAILURES:
            return
    pytest.fail("the launches are as they should be")


def test_no_rows_launch_no_more_than_sums_of_nothing():
    x, weight, stats = torch.ones(0, 40), torch.ones(40), torch.ones(2, 0)
    with TritonRecorder().pretended() as recorder:
        backend = importlib.import_module(BACKEND)
        backend.forward(x, weight, None, EPS, False, OFFSET, True)
        assert not recorder.launches
        backend.backward(x, None, x, weight, stats, False, OFFSET, True, False)
        assert [(launch.name, launch["count"]) for launch in recorder.launches] == [("chain", 0)]
