"""The recorders of launches: what they hold a launch to, and that they leave nothing behind."""

from __future__ import annotations

import sys
from contextlib import suppress

import pytest
import torch

from rl_kernels.core.cuda.program import Program
from rl_kernels.core.testing.launches import Launch, Recorder, strided, tensor_map
from rl_kernels.core.testing.parameters import parameters_of, signature_of
from rl_kernels.core.testing.triton_launches import Descriptor, TritonRecorder

HEADER = (
    "struct Rows {\n    const i64* ids;  // of all\n    int count, odd;\n    int all() const { return count; }\n};\n"
)
SOURCE = """#include "rows.cuh"
struct Args : Rows {
    const void *bias, *left;
    float* out;
};
extern "C" __global__ void __launch_bounds__((1 + 2) * 32, 2)
    add(const __grid_constant__ TensorMap map, Args p, float x) {}
"""


@pytest.fixture
def program(make_kernels):
    make_kernels("recorded_kernels", add__cu=SOURCE, rows__cuh=HEADER)
    return Program("recorded_kernels", "add.cu", "sm_90a", (("DTYPE", 1),))


def launched(program, seen, **changes):
    """Launch with good arguments but for the changes."""
    good = {"ids": torch.zeros(4, dtype=torch.int64), "count": 4, "odd": 1, "bias": None, "left": None}
    named = {**good, "out": torch.zeros(4), "x": 0.5, "grid": 1, "block": 64, "shared": 0, **changes}
    recorder = Recorder({"add": seen.append})
    kernel = recorder._kernel(program, "add", "T(PiiPPP)f", torch.device("cpu"))
    values = [named[name] for name in ("ids", "count", "odd", "bias", "left", "out", "x")]
    kernel.launch(named["grid"], named["block"], bytes(128), *values, shared=named["shared"])


def test_parameters_are_those_of_the_source(program):
    assert signature_of(program, "add") == "T(PiiPPP)f"
    names = [parameter.name for parameter in parameters_of(program, "add")]
    assert names == ["map", "ids", "count", "odd", "bias", "left", "out", "x"]
    with pytest.raises(AssertionError, match="signature"):
        Recorder()._kernel(program, "add", "T(PiPPP)f", torch.device("cpu"))


def test_a_launch_is_named_and_seen(program):
    seen: list[Launch] = []
    launched(program, seen)
    assert (seen[0].grid, seen[0].block, seen[0]["count"], seen[0]["x"]) == ((1, 1, 1), 64, 4, 0.5)
    assert seen[0].constants == {"DTYPE": 1}


REFUSED = {
    "ids": (torch.zeros(4, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)[::2]),
    "out": (torch.zeros(1).expand(4),),
    "count": (1 << 31, 1.5),
    "grid": (0, (1, 1 << 16)),
    "block": (1056, 33),
    "shared": (228 << 10,),
}


def test_what_no_kernel_can_stand_is_refused(program):
    for name, values in REFUSED.items():
        for value in values:
            with pytest.raises(AssertionError):
                launched(program, [], **{name: value})
    x = torch.arange(12.0)
    assert strided(x[2:], (2, 3), (20, 4)).tolist() == [[2, 3, 4], [7, 8, 9]]
    for strides in ((2, 4), (36, 4)):
        with pytest.raises(AssertionError):
            strided(x[2:], (2, 3), strides)


def test_maps_and_descriptors_are_held_to_what_the_copy_engine_needs():
    x = torch.zeros(4, 16).half()
    assert tensor_map(x, (4, 8), swizzle=128).tensor is x
    for bad in (x[:, 1:9], x.t(), x[:1].expand(4, 16), torch.zeros(4, 12).half()):
        with pytest.raises(AssertionError):
            tensor_map(bad, (4, 8))
    Descriptor(x, [4, 16], [16, 1], [4, 8])
    for shape, strides, box in (([4, 8], [16, 1], [4, 8]), ([4, 16], [12, 1], [4, 8]), ([4, 16], [16, 1], [4, 6])):
        with pytest.raises(AssertionError):
            Descriptor(x, shape, strides, box)


def test_modules_are_as_they_were_afterwards():
    with suppress(ImportError):
        # Where it is installed, other tests may or may not have imported it.
        import triton  # noqa: F401

    def ours() -> dict[str, object]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("triton", "rl_kernels")}

    before = {name: module for name, module in ours().items() if "triton" in name}
    for _ in range(2):
        with TritonRecorder().pretended():
            from rl_kernels.core.triton_lib import gemm

            assert gemm.triton is sys.modules["triton"]
    assert {name: module for name, module in ours().items() if "triton" in name} == before
