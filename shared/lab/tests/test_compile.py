"""``rl-kernels compile``: what it compiles and where to, what it says of it, and its exit status."""

import errno
import os
import threading

import pytest
import torch

from rl_kernels.core.commands import cli
from rl_kernels.core.cuda import cache, toolchain
from rl_kernels.core.cuda.program import CompileError, Program, inputs_of
from rl_kernels.core.cuda.where import cuda_backend
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.testing.resources import serialized_in
from rl_kernels.lab.compile import cli as compile_cli

MISSING = toolchain.why_no_compiler()
compiling = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

FINE = 'extern "C" __global__ void fine(float* x) { __shared__ float s[32]; s[threadIdx.x] = 1; x[0] = s[0] * TIMES; }'
WARNING = 'extern "C" __global__ void warning(float* x) { int unused; x[0] = 1; }'
STACK = """
extern "C" __global__ void stack(float* x, int n) {
    float held[99];
    for (int i = 0; i < 99; ++i) held[i] = x[i];
    x[0] = held[n];
}
"""


def operator(name, *backends):
    return Operator(name, "toy_pkg", "a toy", ("N",), frozenset({"N"}), {}, {}, backends, lambda x: Call.of(x))


NATIVE = Backend("native", "toy_pkg.native", {"cpu": INVARIANT})
TOYS = (
    operator(
        "double",
        cuda_backend("cuda-sm90", "toy_pkg.cuda_sm90", archs="sm_90"),
        cuda_backend("cuda-generic", "toy_pkg.cuda_generic", archs="sm_80+"),
        NATIVE,
    ),
    operator("plain", NATIVE),
)


@pytest.fixture
def offered(make_module):
    """What the backends of ``double`` have to compile, by target; change it."""
    made = {
        "generic": {"sm_80": [("fine.cu", (("TIMES", 2),))], "sm_90": [("fine.cu", (("TIMES", 2),))]},
        "sm90": {"sm_90a": [("fine.cu", (("TIMES", 3),)), ("fine.cu", (("TIMES", 4),))]},
    }

    def programs(kind):
        return lambda arch: [Program("toy_kernels", file, arch, defines) for file, defines in made[kind].get(arch, ())]

    for kind in made:
        make_module(f"toy_pkg.cuda_{kind}", programs=programs(kind))
    return made


@pytest.fixture(autouse=True)
def toys(announce, make_module, make_kernels, cubins, offered, monkeypatch):
    make_module("toy_pkg")
    announce(compile_cli, *TOYS)
    monkeypatch.setenv("COLUMNS", "200")
    return make_kernels("toy_kernels", fine__cu=FINE, warning__cu=WARNING, stack__cu=STACK, wrong__cu="wrong")


@compiling
def test_all_targets_into_the_cache(cubins, capsys, monkeypatch):
    assert cli.main(["compile", "--arch", "all"]) == 0
    said = capsys.readouterr()
    rows = [line.split() for line in said.out.splitlines()[1:]]
    assert [row[:5] for row in rows] == [
        ["double", "fine.cu", "TIMES=3", "sm_90a", "fine"],
        ["double", "fine.cu", "TIMES=4", "sm_90a", "fine"],
        ["double", "fine.cu", "TIMES=2", "sm_80", "fine"],
        ["double", "fine.cu", "TIMES=2", "sm_90", "fine"],
    ]
    assert all(int(row[5]) > 0 and row[6:] == ["128", "0", "0"] for row in rows)
    assert said.err == ""
    # Nothing is left to be compiled.
    monkeypatch.setattr(cache, "compile_program", None)
    assert cache.cubin_of(Program("toy_kernels", "fine.cu", "sm_90a", (("TIMES", 4),)))


def listed(*argv):
    return [(name, str(one)) for name, one in compile_cli._programs(compile_cli.parser().parse_args(argv))]


@pytest.fixture
def compiler(monkeypatch):
    """Play a compiler that need not be there: nothing is compiled."""
    monkeypatch.setattr(toolchain, "why_no_compiler", lambda: None)
    monkeypatch.setattr(toolchain, "targets", lambda: frozenset({80, 90}))


def test_a_program_of_two_operators_is_compiled_once(compiler, announce):
    again = operator("again", cuda_backend("cuda-sm90", "toy_pkg.cuda_sm90", archs="sm_90"))
    announce(compile_cli, again, TOYS[0])
    programs = [f"toy_kernels/fine.cu TIMES={times} for sm_90a" for times in (3, 4)]
    for names in (("again", "double"), ("double", "again")):
        options = [word for name in names for word in ("--op", name)]
        assert listed(*options, "--arch", "sm_90a") == [(names[0], one) for one in programs]


def test_kernels_of_one_package(compiler, offered, make_module):
    other = Program("other_kernels", "a.cu", "sm_90a")
    make_module("toy_pkg.cuda_generic", programs=lambda arch: [other] if arch == "sm_90a" else [])
    assert listed("--arch", "sm_90a", "--package", "other_kernels") == [("double", str(other))]
    assert str(Program("toy", "a.cu", "sm_90a", (("X", 1), ("Y", -2)))) == "toy/a.cu X=1 Y=-2 for sm_90a"
    assert len(listed("--arch", "sm_90a")) == 1 + len(listed("--arch", "sm_90a", "--package", "toy_kernels"))


def test_kernels_of_some_dtypes(compiler, offered, capsys):
    fp32, bf16, fp16, none = [("fine.cu", ((("DTYPE", code),) if code >= 0 else ())) for code in (0, 1, 2, -1)]
    offered["generic"]["sm_80"] = [fp32, bf16, fp16, none]
    found = [one for _, one in listed("--arch", "sm_80", "--dtype", "bf16", "fp32")]
    assert found == [f"toy_kernels/fine.cu{define} for sm_80" for define in (" DTYPE=0", " DTYPE=1", "")]
    offered["generic"]["sm_80"] = [fp32]
    assert compile_cli.main(["--arch", "sm_80", "--dtype", "fp16"]) == 2
    assert "--dtype: there are no kernels of fp16" in capsys.readouterr().err


@compiling
def test_one_target_into_a_folder_to_be_shipped(toys, cubins, monkeypatch):
    out = toys / "cubins"
    # A tilde is the home of the user.
    monkeypatch.setenv("HOME", str(toys))
    assert compile_cli.main(["--op", "double", "--arch", "sm_90a", "--out", "~/cubins"]) == 0
    wanted = [Program("toy_kernels", "fine.cu", "sm_90a", (("TIMES", times),)) for times in (3, 4)]
    names = {cache.shipped_name(one, inputs_of(one)) for one in wanted}
    assert {file.name for file in out.iterdir()} == names
    assert not cubins.exists()
    monkeypatch.setattr(toolchain, "why_no_compiler", lambda: "no NVRTC")
    assert cache.cubin_of(wanted[0])[:4] == b"\x7fELF"


@compiling
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("warning.cu", 'warning #177-D: variable "unused" was declared but never referenced'),
        ("stack.cu", "stack spills 0 bytes and has a stack of 4"),
        ("wrong.cu", "toy_kernels/wrong.cu for sm_80: NVRTC_ERROR_COMPILATION"),
    ],
)
def test_what_is_not_in_order_fails_and_all_others_are_compiled(file, words, offered, cubins, capsys):
    offered["generic"]["sm_80"].insert(0, (file, ()))
    assert compile_cli.main(["--arch", "sm_80"]) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert "TIMES=2" in said.out
    assert len(list(cubins.iterdir())) == (1 if file == "wrong.cu" else 2)


@compiling
def test_targets_of_the_gpus_that_are_here_are_the_default(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(compile_cli, "arch_of", lambda kind, index: "sm90")
    assert compile_cli.main([]) == 0
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()[1:]] == ["sm_90a", "sm_90a", "sm_90"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--op", "no"], "unknown operator 'no'; installed: double, plain"),
        (["--op", "plain"], "--op: plain has no CUDA backend"),
        (["--arch", "90"], "argument --arch: expected a target such as sm_80 or sm_90a, or all, got '90'"),
        (["--arch", "sm_12"], "--arch: NVRTC compiles for sm_80, sm_90, got 'sm_12'"),
        (["--arch", "sm_90a", "sm_12"], "--arch: NVRTC compiles for sm_80, sm_90, got 'sm_12'"),
        (["--op", "double", "--arch", "sm_80a"], "--arch: there are no kernels for sm_80a"),
        (["--out", __file__, "--arch", "sm_80"], "--out: "),
        (["--arch", "sm_80", "--package", "toy"], "--package: kernels are in toy_kernels, got 'toy'"),
    ],
)
def test_bad_arguments(argv, words, refused, monkeypatch):
    monkeypatch.setattr(toolchain, "why_no_compiler", lambda: None)
    monkeypatch.setattr(toolchain, "targets", lambda: frozenset({80, 90}))
    monkeypatch.setattr(compile_cli, "compile_program", None)
    assert refused(compile_cli.main, argv).startswith(f"rl-kernels compile: {words}")


def test_nothing_to_compile(announce, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "bindings_version", lambda: None)
        assert compile_cli.main([]) == 2
    expected = "rl-kernels compile: cuda-bindings is not installed: pip install cuda-bindings\n"
    assert capsys.readouterr().err == expected
    announce(compile_cli, TOYS[1])
    assert compile_cli.main([]) == 2
    assert capsys.readouterr().err == "rl-kernels compile: no installed operator has a CUDA backend\n"


@compiling
@pytest.mark.parametrize("shipped", [False, True], ids=["cache", "out"])
def test_a_full_disk_is_told_in_one_line(shipped, tmp_path, capsys, monkeypatch):
    def full(path, cubin):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(cache, "write", full)
    out = ["--out", str(tmp_path / "out")] if shipped else []
    assert compile_cli.main(["--arch", "sm_80", *out]) == 1
    said = capsys.readouterr().err
    place = tmp_path / ("out" if shipped else "cubins")
    program = "toy_kernels/fine.cu TIMES=2 for sm_80"
    assert said.startswith(f"rl-kernels compile: cannot write {program} to {place}: [Errno 28] No space left on device")
    assert said.count("\n") == 1


@pytest.fixture
def many(compiler, cubins, offered):
    """Twelve programs for sm_80."""
    offered["generic"]["sm_80"] = [("fine.cu", (("TIMES", times),)) for times in range(12)]


def test_programs_are_compiled_beside_each_other(many, capsys, monkeypatch):
    together = threading.Barrier(2, timeout=20)

    def compile_program(program):
        together.wait()
        raise CompileError(f"no {program}")

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(compile_cli, "compile_program", compile_program)
    assert compile_cli.main(["--arch", "sm_80"]) == 1
    programs = [f"no toy_kernels/fine.cu TIMES={times} for sm_80" for times in range(12)]
    assert capsys.readouterr().err.splitlines() == programs


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_waits_is_not_compiled_if_nothing_can_be_written(many, capsys, monkeypatch, error):
    compiled, refused = [], threading.Event()

    def compile_program(program):
        if compiled:
            refused.wait(20)
        compiled.append(program)

    def write(*_):
        refused.set()
        raise error("full")

    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(compile_cli, "compile_program", compile_program)
    monkeypatch.setattr(compile_cli, "_write", write)
    if error is OSError:
        assert compile_cli.main(["--arch", "sm_80"]) == 1
        assert capsys.readouterr().err.count("cannot write") == 1
    else:
        with pytest.raises(KeyboardInterrupt):
            compile_cli.main(["--arch", "sm_80"])
    assert len(compiled) < 6


@compiling
def test_a_cache_that_cannot_be_used_or_trusted(cubins, capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as patch:
        patch.setenv(cache.VARIABLE, str(tmp_path / "file" / "folder"))
        assert compile_cli.main(["--arch", "sm_80"]) == 2
    assert "cannot be written; set RL_KERNELS_CACHE" in capsys.readouterr().err
    cubins.mkdir()
    cubins.chmod(0o777)
    assert compile_cli.main(["--arch", "sm_80"]) == 2
    said = capsys.readouterr().err
    assert f"{cubins} can be written by everybody, so what it holds is not trusted; set RL_KERNELS_CACHE" in said
    assert said.count("\n") == 1
    assert not list(cubins.iterdir())


def test_doctor_tells_what_compiles_and_where_it_is_kept_or_what_is_missing(cubins, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(toolchain, "bindings_version", lambda: "13.0.3")
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (13, 0))
    cubins.mkdir()
    cache.write(cubins / f"{'0f' * 32}.cubin", bytes(3 * 2**20))
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "13.0.3" in said
    assert "CUDA 13.0" in said
    assert f"{cubins}: 1 files, 3.0 MiB, can be written" in said
    monkeypatch.setattr(toolchain, "bindings_version", lambda: None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file"))
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "cuda-bindings is not installed: pip install cuda-bindings" in said
    assert "file cannot be written; set RL_KERNELS_CACHE to a folder" in said


def test_products_that_wait_for_each_other_are_found_in_a_log():
    line = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert serialized_in(f"ptxas info    : Used 168 registers\n{line}\n") == [line]
    assert serialized_in("ptxas info    : Used 168 registers") == []
