"""The host side of Triton kernels without Triton: products, launches, schedules; bugs planted in it show."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Draw, with_layout
from rl_kernels.core.testing.host_tests import TritonHost
from rl_kernels.core.testing.planted import Bug
from rl_kernels.core.testing.triton_launches import Descriptor, TritonRecorder
from rl_kernels.core.testing.triton_matmul import matmul

LIB = "rl_kernels.core.triton_lib"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LAYOUTS = ("row", "column", "apart", "odd")
SHAPES = (
    (1, 8, 8),
    (8, 200, 64),
    (64, 24, 40),
    (65, 136, 24),
    (200, 704, 16),
    (200, 40, 72),
    (3, 5, 7),
    (300, 1, 1),
    (7, 16, 0),
)


def product(recorder: TritonRecorder, draw: Draw, shape: tuple[int, int, int], layouts: tuple[str, str, str]) -> None:
    """Hold one product to its definition."""
    gemm = importlib.import_module(f"{LIB}.gemm")
    (m, n, k), (left, right, out_layout) = shape, layouts
    values = draw.normal(m, k), draw.normal(k, n)
    a, b = with_layout(values[0], left), with_layout(values[1], right)
    bias, start = draw.normal(2 * n)[::2], torch.randn(m, n)
    gold = values[0].double() @ values[1].double()
    for kind in (draw.dtype, torch.float32):
        out = with_layout(torch.zeros(m, n, dtype=kind), out_layout)
        gemm.Product(a, b, out, bias, span=256)(a, b, out, bias)
        torch.testing.assert_close(out.double(), (gold + bias.double()), rtol=1e-2, atol=1e-2)
    out = with_layout(start.clone(), out_layout)
    continued = gemm.Product(a.t(), b, out, a_transposed=True, continues=True)
    # The second time with what was compiled for the first.
    for times in (1, 2):
        continued(a.t(), b, out)
        torch.testing.assert_close(out.double(), times * gold + start, rtol=1e-5, atol=1e-5)
    described = [isinstance(recorder.launches[-1][name], Descriptor) for name in ("a", "b", "c")]
    if recorder.arch != "sm90":
        assert not any(described)
    elif draw.dtype != torch.float32 and not (m | n | k) % 8 and k and "apart" not in layouts and "odd" not in layouts:
        assert described[:2] == [True, True]


def expand(draw: Draw) -> None:
    """Rows that overlap, a single row of odd pitch, tiles of a table that stay."""
    gemm = importlib.import_module(f"{LIB}.gemm")
    row, odd = draw.normal(1, 64).expand(70, 64), draw.normal(2, 69)[:1, :64]
    right = draw.normal(64, 40)
    for a in (row, odd, draw.normal(500, 64)):
        out = torch.zeros(len(a), 40, dtype=draw.dtype)
        gemm.Product(a, right, out)(a, right, out)
        torch.testing.assert_close(out.double(), a.double() @ right.double(), rtol=1e-2, atol=1e-1)
    if draw.dtype == torch.float32:
        return
    schedules = [candidate.schedule for candidate in gemm.schedule_for.__globals__["_candidates"]()]
    for cut in schedules:
        a = draw.normal(8 if cut.swapped else 300, 64)
        for dtype in (draw.dtype, torch.float32):
            out, bias = torch.zeros(len(a), 40, dtype=dtype), draw.normal(40)
            gemm.Product(a, right, out, bias, schedule=cut)(a, right, out, bias)
            gold = a.double() @ right.double() + bias.double()
            torch.testing.assert_close(out.double(), gold, rtol=1e-2, atol=1e-1)


def check_kernels(recorder: TritonRecorder) -> None:
    """A kernel that was compiled is used for what it is good for: the stand-in refuses anything else."""
    import triton
    import triton.language as tl

    launch = importlib.import_module(f"{LIB}.launch")

    @triton.jit
    def first(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Stand for a kernel."""

    @triton.jit
    def second(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Stand for another one."""

    memory = torch.zeros(128)
    # From a multiple of 256 bytes on.
    numbers = memory[-memory.data_ptr() // 4 % 64 :][:64]
    boxes = [Descriptor(numbers.view(8, 8), [8, 8], [8, 1], [rows, 8]) for rows in (4, 8)]
    calls: list[tuple[Any, ...]] = [
        (kernel, (grid,), x, n, block, warps)
        for kernel in (first, second)
        for x in (numbers, numbers[1:], numbers.view(torch.float16), *boxes, None)
        for n in (1, 2, 16)
        for block in (64, 128)
        for warps in (1, 4)
        for grid in (3, 5)
    ]
    # With a tuple of numbers, or without.
    for device, together in itertools.product((0, 1), (3, 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch._C, "_cuda_getDevice", lambda device=device: device)
            for kernel, grid, *args, warps in calls:
                launch.launch(kernel, grid, *args[:together], numbers=tuple(args[together:]), num_warps=warps)
    asked = [(kernel.function.__name__, (*grid, 1, 1), warps) for kernel, grid, *_, warps in calls]
    found = [(one.name, one.grid, one.options["num_warps"]) for one in recorder.launches]
    # Not the two lists as they are: pytest would take minutes to show how they differ.
    assert len(found) == 4 * len(asked)
    assert not [pair for pair in zip(found, 4 * asked, strict=True) if pair[0] != pair[1]][:3]
    assert len(launch._compiled) == 2 * len(calls)


class TestLaunches(TritonHost):
    modules = tuple(f"{LIB}.{name}" for name in ("launch", "schedule", "gemm_kernels", "gemm"))
    bugs = (
        Bug("bias by the wrong dim", "BY_ROW.value if cut.swapped else BY_COLUMN.value", "BY_COLUMN.value"),
        Bug("last rows have no tile", "-(-m // self.rows)", "max(m // self.rows, 1)"),
        Bug("unaligned rows have a descriptor", "(outer | x.data_ptr()) % ALIGNED", "x.data_ptr() % ALIGNED"),
        Bug("kernel of another alignment", "x.dtype, x.data_ptr() % ALIGNMENT", "(x.dtype,)"),
    )
    stand_ins = {"multiply": matmul}
    calls = (None, *(dict(arch=arch, dtype=dtype) for arch in ("sm90", "sm80") for dtype in DTYPES))

    def check(self, call: dict[str, Any] | None, backend: Any, recorder: TritonRecorder) -> None:
        """Check every layout of operands and output, on Hopper and elsewhere; without a call, ``launch`` itself."""
        if call is None:
            check_kernels(recorder)
            return
        number = DTYPES.index(call["dtype"])
        for place, shape in enumerate(SHAPES if recorder.arch == "sm90" else SHAPES[2:4]):
            for i, left in enumerate(LAYOUTS):
                right, out = LAYOUTS[(i + place + number) % 4], LAYOUTS[(place + 2 * i) % 3]
                product(recorder, Draw(call["dtype"], seed=place), shape, (left, right, out))
        expand(Draw(call["dtype"], seed=9))
