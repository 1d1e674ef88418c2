"""Cubins are compiled once, and nothing that was damaged, old or unwritable gets in the way."""

import os
import subprocess
import sys
import warnings

import pytest

from rl_kernels.core.cuda import cache, toolchain
from rl_kernels.core.cuda.program import Compiled, CompileError, Program, inputs_of

PROGRAM = Program("toy_kernels", "one.cu", "sm_90a")


@pytest.fixture
def compiled(monkeypatch):
    """Stand in for the compiler; the list of what it was asked for."""
    asked = []

    def compile_program(program):
        asked.append(program)
        return Compiled(b"\x7fELF" + inputs_of(program).source, "")

    monkeypatch.setattr(cache, "compile_program", compile_program)
    monkeypatch.setattr(toolchain, "why_no_compiler", lambda: None)
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (13, 0))
    return asked


@pytest.fixture
def folder(make_kernels, cubins, compiled):
    return make_kernels("toy_kernels", one__cu="one", two__cu="two")


def another_process():
    cache._memory.clear()


def test_compiled_once_then_from_memory_then_from_disk(folder, cubins, compiled):
    # A folder that we make is trusted whatever the umask.
    before = os.umask(0)
    try:
        first = cache.cubin_of(PROGRAM)
    finally:
        os.umask(before)
    assert cache.trouble() is None
    assert cache.cubin_of(PROGRAM) is first
    another_process()
    assert cache.cubin_of(PROGRAM) == first == b"\x7fELFone"
    assert compiled == [PROGRAM]
    assert len(list(cubins.iterdir())) == 1


@pytest.mark.parametrize("change", ["source", "header", "compiler", "arch", "define"])
def test_whatever_makes_another_cubin_is_another_entry(change, folder, cubins, compiled, monkeypatch):
    cache.cubin_of(PROGRAM)
    another_process()
    program = PROGRAM
    if change == "source":
        (folder / "one.cu").write_text("changed")
    elif change == "header":
        (folder / "new.cuh").write_text("")
    elif change == "compiler":
        monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (13, 1))
    elif change == "arch":
        program = Program("toy_kernels", "one.cu", "sm_80")
    else:
        program = Program("toy_kernels", "one.cu", "sm_90a", (("X", 1),))
    cache.cubin_of(program)
    assert len(compiled) == len(list(cubins.iterdir())) == 2


def test_a_damaged_file_is_made_again(folder, cubins, compiled):
    first = cache.cubin_of(PROGRAM)
    (file,) = cubins.iterdir()
    whole = file.read_bytes()
    for count, damaged in enumerate((whole[:-1], whole[:20], b"", whole[:-1] + b"!"), start=2):
        file.write_bytes(damaged)
        another_process()
        assert cache.cubin_of(PROGRAM) == first
        assert len(compiled) == count
        assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_made_warns_once_and_is_done_without(folder, compiled, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    # Root cannot make it either.
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "folder"))
    with pytest.warns(RuntimeWarning, match="set RL_KERNELS_CACHE to a folder of your own that can be read"):
        cache.cubin_of(PROGRAM)
    # A second warning would be an error.
    cache.cubin_of(Program("toy_kernels", "two.cu", "sm_90a"))
    assert len(compiled) == 2
    assert "cannot be written; set RL_KERNELS_CACHE" in cache.trouble()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_still_read(folder, cubins, compiled):
    cache.cubin_of(PROGRAM)
    another_process()
    cubins.chmod(0o555)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.cubin_of(PROGRAM)
    with pytest.warns(RuntimeWarning, match="RL_KERNELS_CACHE"):
        cache.cubin_of(Program("toy_kernels", "two.cu", "sm_90a"))
    cubins.chmod(0o755)


def test_an_entry_that_can_neither_be_read_nor_written_is_done_without(folder, cubins, compiled):
    cache.path_of(inputs_of(PROGRAM)).mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match=r"Is a directory.*RL_KERNELS_CACHE") as caught:
        assert cache.cubin_of(PROGRAM) == b"\x7fELFone"
    assert (len(caught), [path.is_dir() for path in cubins.iterdir()]) == (1, [True])


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.folder() == tmp_path / ".cache" / "rl-kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "rl-kernels"
    for own in (str(tmp_path / "own"), "~/own"):
        monkeypatch.setenv(cache.VARIABLE, own)
        assert cache.folder() == tmp_path / "own"
    monkeypatch.setenv(cache.VARIABLE, "~no-such-user/own")
    assert "RL_KERNELS_CACHE" in cache.trouble()


def test_a_user_without_a_home_is_served(folder, compiled, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.Path, "home", home)
    with pytest.warns(RuntimeWarning, match=r"home directory.*RL_KERNELS_CACHE"):
        assert cache.cubin_of(PROGRAM) == b"\x7fELFone"
    assert "home directory" in cache.trouble()


def test_the_longest_unused_goes_first(folder, cubins, compiled, monkeypatch):
    monkeypatch.setattr(cache, "LIMIT", 3 * len(cache.sealed(b"\x7fELFfile0")))
    programs = []
    for number in range(3):
        (folder / f"{number}.cu").write_text(f"file{number}")
        programs.append(Program("toy_kernels", f"{number}.cu", "sm_90a"))
        cache.cubin_of(programs[-1])
    for age, program in zip((300, 200, 100), programs, strict=True):
        path = cache.path_of(inputs_of(program))
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    another_process()
    cache.cubin_of(programs[0])  # used now, so the second is the oldest
    (folder / "3.cu").write_text("file3")
    cache.cubin_of(Program("toy_kernels", "3.cu", "sm_90a"))
    assert [cache.path_of(inputs_of(program)).exists() for program in programs] == [True, False, True]


ONE = f"{'0f' * 32}{cache.SUFFIX}"


def test_only_our_own_files_are_removed_and_what_a_killed_process_left(cubins, monkeypatch):
    monkeypatch.setattr(cache, "LIMIT", 100)
    cubins.mkdir()
    left = cubins / f".writing-x{cache.SUFFIX}"
    left.write_bytes(bytes(90))
    os.utime(left, (1, 1))
    cache.keep(cubins / ONE, b"cubin")
    assert [path.name for *_, path in cache.contents(cubins)] == [ONE]
    monkeypatch.setattr(cache, "LIMIT", 0)
    others = ["somebody.cubin", f"{'g' * 64}.cubin", f"sm_90a-{'0' * 64}.cubin", ".hidden.cubin", "notes.txt"]
    for name in others:
        (cubins / name).write_bytes(bytes(9))
    (cubins / f"{'1' * 64}.cubin").mkdir()
    cache.keep(cubins / ONE, b"cubin")
    assert sorted(path.name for path in cubins.iterdir()) == sorted([*others, f"{'1' * 64}.cubin"])


@pytest.mark.parametrize("fault", ["can be written by everybody", "belongs to another user"])
def test_a_folder_that_others_may_have_written_is_not_trusted(fault, folder, cubins, compiled, monkeypatch):
    first = cache.cubin_of(PROGRAM)
    (file,) = cubins.iterdir()
    file.write_bytes(cache.sealed(b"planted"))
    owner = cubins.stat().st_uid
    if "everybody" in fault:
        cubins.chmod(0o777)
    elif owner == 0:
        os.chown(cubins, 1234, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"{fault}, so what it holds is not trusted; set RL_KERNELS_CACHE" in cache.trouble()
    another_process()
    with pytest.warns(RuntimeWarning, match=fault):
        assert cache.cubin_of(PROGRAM) == first
    assert compiled == [PROGRAM] * 2
    assert file.read_bytes() == cache.sealed(b"planted")


def test_a_cubin_of_the_wheel_needs_no_compiler(folder, cubins, compiled, monkeypatch):
    monkeypatch.setattr(toolchain, "why_no_compiler", lambda: "no NVRTC")
    with pytest.raises(CompileError, match=r"one\.cu for sm_90a: no NVRTC"):
        cache.cubin_of(PROGRAM)
    (folder / "cubins").mkdir()
    assert not cache.ships("toy_kernels", "sm_90a")
    cache.write(folder / "cubins" / cache.shipped_name(PROGRAM, inputs_of(PROGRAM)), b"shipped")
    assert cache.ships("toy_kernels", "sm_90a")
    assert not cache.ships("toy_kernels", "sm_90")
    assert cache.cubin_of(PROGRAM) == b"shipped"
    assert not compiled
    assert not cubins.exists()


@pytest.mark.parametrize("changed", ["one.cu", "cubin"])
def test_a_cubin_of_the_wheel_that_fits_no_more_is_left_alone(changed, folder, compiled):
    (folder / "cubins").mkdir()
    file = folder / "cubins" / cache.shipped_name(PROGRAM, inputs_of(PROGRAM))
    cache.write(file, b"shipped")
    other = file if changed == "cubin" else folder / changed
    other.write_bytes(other.read_bytes()[:-1])
    assert cache.cubin_of(PROGRAM) != b"shipped"
    assert compiled == [PROGRAM]


MISSING = toolchain.why_no_compiler()
TEXT = 'extern "C" __global__ void one(float* x) { x[threadIdx.x] = 1; }'
READ = """
import hashlib
from rl_kernels.core.cuda.cache import cubin_of
from rl_kernels.core.cuda.program import Program
print(hashlib.sha256(cubin_of(Program("toy_kernels", "one.cu", "sm_90a"))).hexdigest())
"""


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_processes_that_start_at_once_with_an_empty_cache(make_kernels, cubins):
    folder = make_kernels("toy_kernels", one__cu=TEXT)
    path = os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", READ]
    started = [
        subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert [(process.returncode, said[1]) for process, said in zip(started, ended, strict=True)] == [(0, b"")] * 2
    assert len({said[0] for said in ended}) == 1
    assert [path.suffix for path in cubins.iterdir()] == [cache.SUFFIX]
