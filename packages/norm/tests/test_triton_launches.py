"""The host side of the Triton backend without Triton: ``native`` stands for its kernels; planted bugs show."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.rowwise.operands import pad_to
from rl_kernels.core.testing.host_tests import TritonHost
from rl_kernels.core.testing.planted import Bug
from rl_kernels.norm.backends import native

FEW_STEPS, EPS, OFFSET = 32, 1e-5, 0.5


class Case(NamedTuple):
    """A call of a norm: rows and columns, and the operands that it has."""

    rows: int
    size: int
    dtype: torch.dtype = torch.bfloat16
    weight: torch.dtype | None = torch.bfloat16
    residual: bool = False
    bias: bool = False
    centered: bool = False
    cast_first: bool = True
    contiguous: bool = True


def dense(x, *shape):
    """Return a tensor that kernels read without strides, at 16 bytes at once."""
    assert x.shape == shape
    assert x.is_contiguous()
    assert x.data_ptr() % 16 == 0
    return x


def step_of(size):
    """Return the rows of a step, which follow from D alone, as the tile does."""
    return min(max(16384 // (1 << max(size - 1, 1).bit_length()), 16), 128)


def operands(launch, *names):
    """Check the tile, and return the operands by name: rows, or a vector."""
    size, count = launch["D"], launch["count"]
    width = 1 << max(size - 1, 1).bit_length()
    rows = min(max(2048 // width, 1), 16)
    warps = min(max(width * rows // 512, 1), 16)
    assert (launch["WIDTH"], launch["ROWS"], launch.options["num_warps"]) == (width, rows, warps)
    shapes = {"WEIGHT": (size,), "BIAS": (size,), "STATS": (2, count)}
    return [None if launch[name] is None else dense(launch[name], *shapes.get(name, (count, size))) for name in names]


def forward(launch):
    x, residual, *rest = operands(launch, "X", "RESIDUAL", "WEIGHT", "BIAS")
    assert launch.grid == (-(-len(x) // launch["ROWS"]), 1, 1)
    form = *rest, launch["eps"], launch["CENTERED"], launch["offset"], launch["CAST_FIRST"]
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    results = dict(zip(("Y", "STATS"), native.forward(total, *form), strict=True))
    for name, value in (results | ({} if residual is None else {"SUM": total})).items():
        dense(launch[name], *value.shape).copy_(value)


def backward(launch):
    tensors = operands(launch, "GRAD", "GRAD_SUM", "X", "WEIGHT", "STATS")
    _, grad_sum, x, *_ = tensors
    (count, size), step = x.shape, step_of(x.shape[1])
    per = launch["ROWS"] if count <= FEW_STEPS * step else step
    assert (launch.grid, launch["PER"]) == ((-(-count // per), 1, 1), per)
    tile_bytes = launch["ROWS"] * launch["WIDTH"] * x.element_size() * (2 if grad_sum is None else 3)
    assert launch["STAGES"] == (3 if 2 * tile_bytes <= 1 << 16 else 1)
    dx, *terms = native.terms_of(*tensors, launch["CENTERED"], launch["offset"])
    dense(launch["DX"], count, size).copy_(dx)
    for name, of_rows in zip(("PARTS_WEIGHT", "PARTS_BIAS"), terms, strict=True):
        if launch[name] is not None:
            parts = pad_to(of_rows, 0, per).unflatten(0, (-1, per)).sum(1)
            dense(launch[name], *launch.grid[:1], size).copy_(parts)


def chain(launch):
    count, size, out = launch["count"], launch["D"], launch["OUT"]
    assert launch["AHEAD"] % launch["INNER"] == 0
    assert launch.grid == (-(-size // launch["COLUMNS"]), 1, 1)
    out = out.as_strided((size,), (launch["stride"],), out.storage_offset())
    out.copy_(dense(launch["PARTS"], count, size).sum(0) + (out if launch["CONTINUED"] else 0.0))


class TestLaunches(TritonHost):
    modules = ("rl_kernels.norm.backends.triton.backend",)
    bugs = (
        Bug("a program short", "ceil_div(count, rows)", "count // rows"),
        Bug("buffer's stride ignored", "main_grad.stride(0)", "1"),
        Bug("alignment not looked at", "() and x.data_ptr() % ALIGNED == 0", "()"),
    )
    stand_ins = {"forward": forward, "backward": backward, "chain": chain}
    calls = (
        Case(37, 4096),
        Case(1000, 128),
        Case(4097, 40),
        Case(513, 1025, residual=True),
        Case(5, 8192, residual=True),
        Case(2, 16384, torch.float32, torch.float32, residual=True),
        Case(5, 2048, residual=True),
        Case(16, 77, torch.float32, torch.float32),
        Case(33, 768, residual=True, bias=True, centered=True, cast_first=False),
        Case(3, 64, weight=torch.float32),
        Case(2, 40, weight=None),
        Case(3, 1),
        Case(1, 16384),
        Case(33, 96, residual=True, contiguous=False),
    )

    def check(self, call, backend, recorder):
        """Compare both passes with ``native``: bit for bit, but sums over rows, which add in another order."""
        rows, size, dtype = call[:3]
        x, other, grad = (torch.randn(rows, size).to(dtype) for _ in range(3))
        weight = None if call.weight is None else torch.rand(size).to(call.weight)
        residual, bias = other if call.residual else None, torch.randn(size).to(dtype) if call.bias else None
        if not call.contiguous:
            # Rows with a gap between them, columns of a transposed matrix, and a weight at an odd address.
            x, residual = torch.randn(rows, size + 4).to(dtype)[:, 4:], torch.randn(size, rows).to(dtype).t()
            weight = torch.rand(size + 1).to(call.weight)[1:]
        form = weight, bias, EPS, call.centered, OFFSET, call.cast_first
        name, leading = ("forward", (x,)) if residual is None else ("forward_sum", (x, residual))
        *results, stats = getattr(backend, name)(*leading, *form)
        for value, wanted in zip((*results, stats), getattr(native, name)(*leading, *form), strict=True):
            assert torch.equal(value, wanted)
        saved = grad, residual, x, weight, stats, call.centered, OFFSET
        for needed in ((True, True), (True, False), (False, False)):
            self.close(backend.backward(*saved, *needed), native.backward(*saved, *needed))
        buffers = [torch.ones(size, 3)[:, 1] for _ in range(2)]
        self.close(backend.backward_into(*saved, buffers[0], True), native.backward_into(*saved, buffers[1], True))
        self.close((x, buffers[0]), (x, buffers[1]))
        assert len(recorder.launches) == 1 + 3 + 2 + 1 + 3
        per = {launch["PER"] for launch in recorder.launches if launch.name == "backward"}
        inner = {launch["INNER"] for launch in recorder.launches if launch.name == "chain"}
        assert inner == {step_of(size) // rows for rows in per}

    def close(self, results, wanted):
        """Compare dx bit for bit, and sums over rows."""
        assert torch.equal(results[0], wanted[0])
        for value, other in zip(results[1:], wanted[1:], strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-3)

    def test_no_rows_launch_no_more_than_sums_of_nothing(self):
        x, weight, stats = torch.ones(0, 40), torch.ones(40), torch.ones(2, 0)
        recorder = self.recorder(None)
        with self.recording(recorder):
            from rl_kernels.norm.backends.triton import backend

            backend.forward(x, weight, None, EPS, False, OFFSET, True)
            assert not recorder.launches
            _, dweight, _ = backend.backward(x, None, x, weight, stats, False, OFFSET, True, False)
            assert not dweight.any()
        assert [(launch.name, launch["count"]) for launch in recorder.launches] == [("chain", 0)]
