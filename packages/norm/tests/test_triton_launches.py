"""Launches of the Triton backend, recorded without a GPU and compared with what the shapes imply."""

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
FEW_STEPS, EPS, OFFSET = 32, 1e-5, 0.5
BUGS = (
    Bug("a program short", "ceil_div(count, rows)", "count // rows"),
    Bug("buffer's stride ignored", "main_grad.stride(0)", "1"),
    Bug("alignment not looked at", "() and x.data_ptr() % ALIGNED == 0", "()"),
)


class Given(NamedTuple):
    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    grad: torch.Tensor
    centered: bool = False
    cast_first: bool = True


def made(rows, size, dtype=torch.bfloat16, *, residual=False, weight=torch.bfloat16, bias=False, **form):
    x, other, grad = (torch.randn(rows, size).to(dtype) for _ in range(3))
    scale = None if weight is None else torch.rand(size).to(weight)
    return Given(x, other if residual else None, scale, torch.randn(size).to(dtype) if bias else None, grad, **form)


def not_contiguous():
    """Rows with a gap between them, columns of a transposed matrix, and a weight at an odd address."""
    x, residual = torch.randn(33, 100).bfloat16()[:, 4:], torch.randn(96, 33).bfloat16().t()
    return made(33, 96)._replace(x=x, residual=residual, weight=torch.rand(97).bfloat16()[1:])


CALLS = {
    "llama": partial(made, 37, 4096),
    "heads": partial(made, 1000, 128),
    "many": partial(made, 4097, 40),
    "many-wide": partial(made, 513, 1025, residual=True),
    "wide-residual": partial(made, 5, 8192, residual=True),
    "wide-fp32": partial(made, 2, 16384, torch.float32, residual=True, weight=torch.float32),
    "residual": partial(made, 5, 2048, residual=True),
    "odd": partial(made, 16, 77, torch.float32, weight=torch.float32),
    "layer": partial(made, 33, 768, bias=True, residual=True, centered=True, cast_first=False),
    "mixed": partial(made, 3, 64, weight=torch.float32),
    "no-weight": partial(made, 2, 40, weight=None),
    "one-column": partial(made, 3, 1),
    "widest": partial(made, 1, 16384),
    "not-contiguous": not_contiguous,
}


def tile_of(size):
    """Return columns and rows of a tile, rows of a step, and warps: all follow from D."""
    width = 1 << max(size - 1, 1).bit_length()
    rows = min(max(2048 // width, 1), 16)
    return width, rows, min(max(16384 // width, 16), 128), min(max(width * rows // 512, 1), 16)


def check_operands(launch, **expected):
    """Operands keep their values; they are contiguous and 16-byte aligned."""
    for name, tensor in expected.items():
        found = launch[name]
        assert (found is None) == (tensor is None), name
        if found is not None:
            assert torch.equal(found, tensor), name
            assert found.is_contiguous(), name
            assert found.data_ptr() % 16 == 0, name


def check_tile(launch, given):
    """Check the options that forward and backward share; return the rows of a tile and of a step."""
    count, size = given.x.shape
    width, rows, step, warps = tile_of(size)
    assert (launch["D"], launch["WIDTH"], launch["ROWS"], launch.options["num_warps"]) == (size, width, rows, warps)
    assert (launch["count"], launch["offset"], launch["CENTERED"]) == (count, OFFSET, given.centered)
    return rows, step


def check_forward(given, launches, output, total, stats):
    (launch,) = launches
    rows, _ = check_tile(launch, given)
    assert launch.grid == (-(-len(given.x) // rows), 1, 1)
    check_operands(launch, X=given.x, RESIDUAL=given.residual, WEIGHT=given.weight, BIAS=given.bias)
    assert all(launch[name] is value for name, value in (("Y", output), ("SUM", total), ("STATS", stats)))
    assert (launch["eps"], launch["CAST_FIRST"]) == (EPS, given.cast_first)
    assert output.shape == given.x.shape
    assert (stats.shape, stats.dtype) == ((2, len(given.x)), torch.float32)


def check_backward(given, launches, dx, stats, **sums):
    """``sums`` are (gradient or None, whether it continues a buffer) of WEIGHT and BIAS."""
    launch, *chains = launches
    rows, step = check_tile(launch, given)
    count, size = given.x.shape
    per = rows if count <= FEW_STEPS * step else step
    programs = -(-count // per)
    assert (launch.grid, launch["PER"]) == ((programs, 1, 1), per)
    tile_bytes = rows * launch["WIDTH"] * given.x.element_size() * (2 if given.residual is None else 3)
    assert launch["STAGES"] == (3 if 2 * tile_bytes <= 1 << 16 else 1)
    check_operands(launch, GRAD=given.grad, GRAD_SUM=given.residual, X=given.x, WEIGHT=given.weight)
    assert launch["STATS"] is stats
    assert launch["DX"] is dx
    for name, (out, is_continued) in sums.items():
        parts = launch[f"PARTS_{name}"]
        assert (parts is None) == (out is None)
        if out is None:
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


def check(given, recorder):
    """Check what the functions of the backend launch for a call."""
    backend, total = importlib.import_module(BACKEND), None
    form = (given.weight, given.bias, EPS, given.centered, OFFSET, given.cast_first)
    recorder.launches.clear()
    if given.residual is None:
        output, stats = backend.forward(given.x, *form)
    else:
        output, total, stats = backend.forward_sum(given.x, given.residual, *form)
    check_forward(given, recorder.launches, output, total, stats)
    saved = (given.grad, given.residual, given.x, given.weight, stats, given.centered, OFFSET)
    for needed in ((True, True), (True, False), (False, False)):
        recorder.launches.clear()
        dx, *found = backend.backward(*saved, *needed)
        dweight, dbias = ((x if is_needed else None, False) for x, is_needed in zip(found, needed, strict=True))
        check_backward(given, recorder.launches, dx, stats, WEIGHT=dweight, BIAS=dbias)
    recorder.launches.clear()
    buffer = torch.zeros(given.x.shape[1], 3)[:, 1]
    dx, dbias = backend.backward_into(*saved, buffer, True)
    check_backward(given, recorder.launches, dx, stats, WEIGHT=(buffer, True), BIAS=(dbias, False))


def check_all(plant=nullcontext):
    with TritonRecorder().pretended() as recorder, plant():
        for make in CALLS.values():
            check(make(), recorder)


def test_launches():
    check_all()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_show(bug):
    with pytest.raises((AssertionError, RuntimeError)):
        check_all(partial(planted, [BACKEND], bug))


def test_no_rows_launch_no_more_than_sums_of_nothing():
    x, weight, stats = torch.ones(0, 40), torch.ones(40), torch.ones(2, 0)
    with TritonRecorder().pretended() as recorder:
        backend = importlib.import_module(BACKEND)
        backend.forward(x, weight, None, EPS, False, OFFSET, True)
        assert not recorder.launches
        backend.backward(x, None, x, weight, stats, False, OFFSET, True, False)
        assert [(launch.name, launch["count"]) for launch in recorder.launches] == [("chain", 0)]
