"""What is given to NVRTC, what comes back, and what its log says; all without a GPU."""

import dataclasses

import pytest

from rl_kernels.core.cuda import program as module
from rl_kernels.core.cuda import toolchain
from rl_kernels.core.cuda.program import CompileError, Inputs, Program, compile_program, inputs_of
from rl_kernels.core.testing.resources import Resources, resources_of, warnings_of

MISSING = toolchain.why_no_compiler()
compiling = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

SCALE = """
#include "half.cuh"
extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= HALF * TIMES; }
"""
HALF = "#pragma once\n#define HALF 0.5f\n"
PROGRAM = Program("toy_kernels", "scale.cu", "sm_90a", (("TIMES", 3),))


@pytest.fixture
def folder(make_kernels):
    return make_kernels("toy_kernels", scale__cu=SCALE, half__cuh=HALF, lost__cu='#include "lost.cuh"\n')


def test_the_compiler_reads_the_source_the_headers_and_the_constants(folder):
    inputs = inputs_of(PROGRAM)
    assert inputs.source == SCALE.encode()
    assert dict(inputs.headers)["half.cuh"] == HALF.encode()
    assert inputs.options[0] == "--gpu-architecture=sm_90a"
    assert {"--std=c++17", "--fmad=false", "-DTIMES=3"} < set(inputs.options)


def test_headers_of_core_are_known_by_the_name_of_the_project(folder, monkeypatch, tmp_path):
    shared = tmp_path / "core" / "include" / "rl_kernels"
    shared.mkdir(parents=True)
    (shared / "toy.cuh").write_text("#define TOY 1\n")
    real = module.files
    monkeypatch.setattr(
        module, "files", lambda name: tmp_path / "core" if name == "rl_kernels.core.cuda" else real(name)
    )
    assert [name for name, _ in inputs_of(PROGRAM).headers] == ["half.cuh", "rl_kernels/toy.cuh"]


INPUTS = Inputs(b"source", (("a.cuh", b"one"),), ("-DX=1",))


def test_whatever_the_compiler_reads_changes_the_digest():
    others = (
        {"source": b"sourcE"},
        *({"headers": (header,)} for header in (("a.cuh", b"two"), ("b.cuh", b"one"), ("a.cuho", b"ne"))),
        *({"options": options} for options in (("-DX=2",), ("-DX=1", "13"))),
    )
    digests = [dataclasses.replace(INPUTS, **other).digest("12") for other in others]
    assert len({INPUTS.digest("12"), INPUTS.digest(), *digests}) == len(digests) + 2
    assert INPUTS.digest("12") == Inputs(b"source", (("a.cuh", b"one"),), ("-DX=1",)).digest("12")


@compiling
def test_a_cubin_without_a_gpu(folder):
    compiled = compile_program(PROGRAM)
    assert compiled.cubin[:4] == b"\x7fELF"
    # Constants reach the kernel.
    assert compiled.cubin != compile_program(dataclasses.replace(PROGRAM, defines=(("TIMES", 5),))).cubin
    (used,) = resources_of(compiled.log)
    assert used == Resources("scale", used.registers, 0, 0, 0, 0)
    assert 0 < used.registers < 64
    assert warnings_of(compiled.log) == []


@compiling
def test_multiplications_and_additions_are_not_fused(make_kernels):
    text = 'extern "C" __global__ void f(float* x, float a) { x[0] = x[0] * a + 1.0f; }'
    make_kernels("toy_kernels", plain__cu=text, fused__cu=text.replace("x[0] * a + 1.0f", "fmaf(x[0], a, 1.0f)"))
    plain, fused = (compile_program(Program("toy_kernels", f"{name}.cu", "sm_80")).cubin for name in ("plain", "fused"))
    assert plain != fused


@compiling
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"defines": ()}, ["scale.cu", "sm_90a", "NVRTC_ERROR_COMPILATION", "scale.cu(3)", '"TIMES" is undefined']),
        ({"arch": "sm_12345"}, ["scale.cu", "sm_12345", "gpu-architecture"]),
        ({"file": "no.cu"}, ["toy_kernels/no.cu", "no such file"]),
        ({"file": "lost.cu"}, ["toy_kernels/lost.cu", 'cannot open source file "lost.cuh"']),
    ],
)
def test_errors_name_the_file_the_target_and_the_log(change, words, folder):
    with pytest.raises(CompileError) as caught:
        compile_program(dataclasses.replace(PROGRAM, **change))
    assert [word for word in words if word not in str(caught.value)] == []


def test_functions_that_are_called_count_with_their_kernel():
    log = """
ptxas info    : Compiling entry function 'outer' for 'sm_90a'
ptxas info    : Function properties for outer
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for inner
ptxas         .     16 bytes stack frame, 0 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1056 bytes smem, 24 bytes cumulative stack size
ptxas info    : Compiling entry function 'light' for 'sm_90a'
ptxas info    : Used 8 registers
"""
    used, light = resources_of(log)
    assert used == Resources("outer", 168, 1056, 4, 20, 24)
    assert (used.spills, light) == (24, Resources("light", 8, 0, 0, 0, 0))
