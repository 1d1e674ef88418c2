"""``rl-kernels compile --backend triton``: what it compiles, what it says of it, and its exit status."""

import json
import re
import subprocess
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

from rl_kernels.core.commands import cli
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.triton_lib.launch import INTERPRETED, triton_backend
from rl_kernels.core.triton_lib.targets import LEAST, TARGETS, shared_memory_of
from rl_kernels.lab.compile import ahead, triton

NATIVE = Backend("native", "toy_pkg.native", {"cpu": INVARIANT})
SCALED = """
import triton
import triton.language as tl


@triton.jit
def scaled(x, out, factor, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) * factor)
"""

SHIFTED = """
import triton
import triton.language as tl


@triton.jit
def shifted(x, out, count, BLOCK: tl.constexpr, OWN: tl.constexpr):
    at = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.float32)
    older = tl.zeros([BLOCK], tl.float32) if OWN else before
    for i in range(count):
        tl.store(out + i * BLOCK + at, older)
        before, older = tl.load(x + i * BLOCK + at), before
"""


def operator(name, *backends):
    return Operator(name, "toy_pkg", "a toy", ("N",), frozenset({"N"}), {}, {}, backends, lambda x: Call.of(x))


def used(kernel="one", **given):
    numbers = {"warps": 4, "stages": 2, "registers": 40, "shared": 1024, "spills": 0, **given}
    return ahead.Used(kernel, (("BLOCK", 64), ("BIAS", None)), "fp32", **numbers)


@pytest.fixture(autouse=True)
def toys(announce, make_module, monkeypatch):
    make_module("toy_pkg")
    double = operator("double", triton_backend("toy_pkg.triton.backend"), NATIVE)
    announce(triton, double, operator("plain", NATIVE))
    monkeypatch.setattr(triton, "why_not", lambda: None)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def made(monkeypatch):
    """What each task gives; change it. Nothing is compiled."""
    found = {}

    def compile_all(tasks):
        return [triton.Compiled(task, *found.get(task, ((used(),), ()))) for task in tasks]

    monkeypatch.setattr(triton, "compile_all", compile_all)
    return found


def command(*argv):
    return cli.main(["compile", "--backend", "triton", *argv])


def test_a_row_for_each_target(made, capsys):
    task = triton.Task("double", "sm_80", "bf16")
    made[task] = ((used(), used("other", registers=255, spills=16, shared=2048)), ())
    assert command() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == list(triton.HEADER)
    assert lines[1].split() == ["double", "sm_80", "3", "255", "16", "2048", str(163 * 1024)]
    assert [line.split()[1] for line in lines[1:]] == list(TARGETS)


def test_a_row_for_each_kernel(made, capsys):
    assert command("--arch", "sm_89", "--op", "double", "--verbose", "--dtype", "bf16") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert command("--arch", "sm_89", "--op", "double", "--verbose") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == list(triton.DETAILS)
    expected = ["double", "sm_89", "one", "bf16", "BLOCK=64", "4", "2", "40", "0", "1024"]
    assert [line.split() for line in lines] == [expected, [*expected[:3], "fp32", *expected[4:]]]


def test_rows_in_json(made, make_module, capsys):
    make_module("triton", __version__="9")
    assert command("--arch", "gfx942", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["environment"] == {"triton": "9", "torch": torch.__version__}
    numbers = {"kernels": 2, "registers": 40, "spills": 0, "shared": 1024, "of": LEAST}
    assert document["records"] == [{"operator": "double", "arch": "gfx942", **numbers}]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            ((used(shared=99 * 1024 + 1),), ()),
            "double sm_86 fp32: one BLOCK=64: 101377 bytes of shared memory, of 101376",
        ),
        (((used(),), ("double sm_86 fp32: calls: ValueError: no",)), "double sm_86 fp32: calls: ValueError: no"),
    ],
)
def test_what_does_not_fit_or_fails_is_a_fault(made, found, words, capsys):
    made[triton.Task("double", "sm_86", "fp32")] = found
    assert command("--arch", "sm_86", "sm_80") == 1
    assert capsys.readouterr().err == f"{words}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--op", "plain"], "--op: plain has no Triton backend"),
        (["--op", "none"], "unknown operator 'none'"),
        (["--arch", "sm_90a"], "--arch: Triton's kernels are compiled for sm_80, "),
        (["--out", "."], "--out, --package: expected only with --backend cuda"),
    ],
)
def test_what_cannot_be_compiled_is_said_before(argv, words, capsys):
    assert command(*argv) == 2
    assert capsys.readouterr().err.startswith(f"rl-kernels compile: {words}")


def test_without_triton_there_is_neither_a_backend_nor_json(monkeypatch, capsys):
    assert cli.main(["compile", "--json"]) == 2
    assert "--verbose, --json: expected only with --backend triton" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(triton, "INSTALLED", False)
    assert command() == 2
    assert capsys.readouterr().err == "rl-kernels compile: Triton is not installed: pip install triton\n"


def test_calls_are_those_beside_the_backend(make_module, monkeypatch):
    seen = []

    def fails():
        raise ValueError("no")

    def calls(dtype):
        yield lambda: seen.append(dtype)
        yield fails

    @contextmanager
    def compiling(target):
        yield [target.name]

    task = triton.Task("double", "sm_80", "bf16")
    (fault,) = triton.faults([triton.compiled(task)])
    assert fault.startswith("double sm_80 bf16: expected a module toy_pkg.triton.ahead that yields calls: No module")
    make_module("toy_pkg.triton")
    make_module("toy_pkg.triton.ahead", calls=calls)
    monkeypatch.setattr(ahead, "compiling", compiling)
    assert triton.compiled(task) == (task, ["sm_80"], ["double sm_80 bf16: fails: ValueError: no"])
    assert seen == [torch.bfloat16]


def test_an_unknown_gpu_has_the_least_shared_memory():
    assert shared_memory_of("sm90") == 227 * 1024
    assert shared_memory_of("sm37") == LEAST == min(target.shared for target in TARGETS.values())


@pytest.mark.skipif(find_spec("triton") is None or INTERPRETED, reason="needs Triton, and that it compiles")
@pytest.mark.parametrize("name", ["sm_89", "gfx942"])
def test_a_kernel_is_compiled_for_a_gpu_that_is_not_there(make_kernels, monkeypatch, tmp_path, name):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    make_kernels("toy_triton", scaled__py=SCALED)
    from toy_triton.scaled import scaled  # type: ignore[import-not-found]

    x = torch.empty(256, device="meta")
    with ahead.compiling(TARGETS[name]) as found:
        for _ in range(2):
            scaled[(1,)](x, x, 2.0, BLOCK=256, num_warps=2)
    (one,) = found
    assert (one.kernel, one.constants, one.dtype, one.warps, one.spills) == ("scaled", (("BLOCK", 256),), "fp32", 2, 0)
    assert 0 < one.registers < 128
    if name == "sm_89":
        from triton import knobs

        (cubin,) = tmp_path.glob("*/scaled.cubin")
        read = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
        said = subprocess.run(read, check=True, capture_output=True, text=True).stdout
        assert one.registers == int(re.search(r"REG:(\d+)", said)[1])


@pytest.mark.skipif(find_spec("triton") is None or INTERPRETED, reason="needs Triton, and that it compiles")
def test_a_loop_that_loses_a_value_is_refused(make_kernels, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    make_kernels("toy_shifted", shifted__py=SHIFTED)
    from toy_shifted.shifted import shifted  # type: ignore[import-not-found]

    x = torch.empty(256, device="meta")
    with ahead.compiling(TARGETS["sm_89"]) as found:
        with pytest.raises(Exception, match=r"shifted\.py:\d+: Triton takes older for constant in this loop"):
            shifted[(1,)](x, x, 2, BLOCK=256, OWN=False, num_warps=2)
        assert not found
        shifted[(1,)](x, x, 2, BLOCK=256, OWN=True, num_warps=2)
    assert [kernel.kernel for kernel in found] == ["shifted"]
