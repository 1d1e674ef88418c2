"""The wheel of a package with CUDA kernels, built both ways: with its sources alone, and with cubins."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rl_kernels.core.cuda import cache, toolchain
from rl_kernels.core.cuda.program import SHIPPED, inputs_of
from rl_kernels.core.registry import kernel_registry

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "packages" / "fused-logp"
CUBINS = f"rl_kernels/fused_logp/backends/cuda/{SHIPPED}/"
MISSING = toolchain.why_no_compiler()

pytestmark = pytest.mark.slow


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a copy of the package, to put cubins into."""
    return copied(PACKAGE, tmp_path)


def copied(package: Path, place: Path) -> Path:
    """Return a copy of a package, whose cubins git ignores as it does in a clone."""
    made = shutil.copytree(package, place / package.name, ignore=shutil.ignore_patterns("__pycache__", SHIPPED))
    (made / ".gitignore").write_text(f"{SHIPPED}/\n", encoding="utf-8")
    return made


def cubins(package: Path, *, sdist: bool = False) -> dict[str, bytes]:
    """Build the wheel, of the tree or of its sdist, and return the cubins in it."""
    made = package.parent / "made"
    if sdist:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(made)]
        subprocess.run(command, cwd=package, check=True, capture_output=True)
        (package,) = made.glob("*.tar.gz")
    options = ("--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", str(made))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(package)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = made.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert len(set(packed.namelist())) == len(packed.namelist())
        return {name: packed.read(name) for name in packed.namelist() if name.endswith(cache.SUFFIX)}


def test_wheel_holds_no_cubin_by_itself(package: Path) -> None:
    assert cubins(package) == {}


def test_wheel_of_core_brings_cubins_of_the_product_that_operators_share(tmp_path: Path) -> None:
    core = copied(ROOT / "shared" / "core", tmp_path)
    (program, *_) = kernel_registry.load("det_gemm").backend("cuda-sm90").load().programs("sm_90a")
    name = f"{program.package.replace('.', '/')}/{SHIPPED}/{cache.shipped_name(program, inputs_of(program))}"
    (core / "src" / name).parent.mkdir()
    (core / "src" / name).write_bytes(b"cubin")
    assert cubins(core) == {name: b"cubin"}


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_wheel_brings_the_cubins_that_are_looked_for(package: Path) -> None:
    place = package / "src" / CUBINS
    program = Path(sys.executable).with_name("rl-kernels")
    command = [program, "compile", "--op", "fused_logp", "--arch", "sm_90", "--out", place]
    subprocess.run(command, check=True, capture_output=True)
    found = cubins(package)
    backends = [b for b in kernel_registry.load("fused_logp").backends if b.name.startswith("cuda-")]
    programs = [program for backend in backends for program in backend.load().programs("sm_90")]
    assert set(found) == {CUBINS + cache.shipped_name(program, inputs_of(program)) for program in programs}
    assert all((cache.unsealed(content) or b"").startswith(b"\x7fELF") for content in found.values())
    shutil.rmtree(package.parent / "made")
    assert cubins(package, sdist=True) == {}
