"""Which kernels were launched, and whose they are: CUDA without a GPU, Triton in its interpreter."""

from unittest.mock import patch

import pytest

from rl_kernels.core.cuda import launch
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.operator import INVARIANT, Backend
from rl_kernels.core.triton_lib.launch import INSTALLED
from rl_kernels.lab.check.launched import Launched, owns, record_launches

PROGRAM = Program("rl_kernels.toy", "toy_sm90.cu", "sm_90a", (("DTYPE", 1),))
GENERAL = Program("rl_kernels.toy", "toy.cu", "sm_90")
TRITON = """
import torch
import triton
import triton.language as tl
from rl_kernels.lab.check.launched import record_launches
from rl_kernels.core.triton_lib.launch import Launch, launch

@triton.jit
def plain(x):
    tl.store(x, tl.load(x) + 1)

@triton.jit
def launched(x):
    tl.store(x, tl.load(x) + 10)

@triton.jit
def repeated(x):
    tl.store(x, tl.load(x) + 100)

@triton.jit
def others(x):
    tl.store(x, tl.load(x) + 1000)

for kernel in (plain, launched, repeated):
    kernel.fn.__module__ = "rl_kernels.toy.kernels"
x = torch.zeros(1)
again = Launch(repeated, (1,), (), num_warps=1)
again(x)
with record_launches() as found:
    plain[(1,)](x)
    launch(launched, (1,), x, num_warps=1)
    again(x)
    others[(1,)](x)
others[(1,)](x)
print(*sorted(map(str, found)), float(x))
"""


def test_a_cuda_kernel_is_seen_while_it_is_recorded():
    started = []
    kernel = object.__new__(launch.Kernel)
    kernel.entry = "forward"
    with (
        patch.dict(launch._kernels, {(PROGRAM, "forward", 0): kernel}),
        patch.object(launch.Kernel, "start", lambda self, *sizes: started.append(sizes)),
    ):
        kernel.start(1)
        with record_launches() as found:
            assert not found
            kernel.start(2)
        kernel.start(3)
    assert started == [(1,), (2,), (3,)]
    assert list(map(str, found)) == ["rl_kernels.toy/toy_sm90.cu:forward for sm_90a"]


@pytest.mark.skipif(not INSTALLED, reason="needs Triton")
def test_a_triton_kernel_is_seen_however_it_is_launched(run_code, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TRITON)
    done = run_code(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", TRITON_INTERPRET="1")
    names = ("launched", "plain", "repeated")
    assert done.stdout.split() == [*(f"rl_kernels.toy.kernels.{name}" for name in names), "2211.0"], done.stderr


@pytest.mark.parametrize(
    ("listed", "own"),
    [
        ({"sm_90a": [PROGRAM], "sm_90": [GENERAL]}, {"toy_sm90.cu"}),
        ({"sm_90": [GENERAL]}, {"toy.cu"}),
        ({}, set()),
    ],
)
def test_a_cuda_backend_owns_its_programs_of_the_most_specific_target(make_module, listed, own):
    make_module("toy_cuda", programs=lambda target: listed.get(target, []))
    is_own = owns(Backend("cuda-toy", "toy_cuda", {"cuda": INVARIANT}), "sm90")
    kernels = [Launched(each.package, each.file, "forward", each.arch) for each in (PROGRAM, GENERAL)]
    assert {kernel.file for kernel in kernels if is_own(kernel)} == own


def test_a_triton_backend_owns_its_package_and_core(make_module):
    make_module("rl_kernels.toy.backends.triton")
    is_own = owns(Backend("triton", "rl_kernels.toy.backends.triton", {"cuda": INVARIANT}), "sm90")
    modules = ["rl_kernels.toy.triton_lib.rows", "rl_kernels.core.triton_lib.gemm", "rl_kernels.toys.rows"]
    assert [is_own(Launched(name, "", "forward", "")) for name in modules] == [True, True, False]
    assert not is_own(Launched(PROGRAM.package, PROGRAM.file, "forward", PROGRAM.arch))


def test_pytorch_ops_have_no_kernels_of_their_own():
    assert owns(Backend("native", "no.such.module", {"cpu": INVARIANT}), "cpu") is None
