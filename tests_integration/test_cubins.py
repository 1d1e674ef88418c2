"""The wheel of a package with CUDA kernels, built both ways: with its sources alone, and with cubins."""

from __future__ import annotations

import os
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
VARIABLE = "RL_KERNELS_CUBINS"
MISSING = toolchain.why_no_compiler()

pytestmark = pytest.mark.slow


def built(out: Path, targets: str | None, *first: Path) -> subprocess.CompletedProcess[str]:
    given = {} if targets is None else {VARIABLE: targets}
    search = os.pathsep.join([*map(str, first), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
    options = ("--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", str(out))
    return subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(PACKAGE)],
        env={**kept, **given, "PYTHONPATH": search},
        capture_output=True,
        text=True,
    )


def told(failed: subprocess.CompletedProcess[str]) -> str:
    """Return what the build said between pip's own lines."""
    assert failed.returncode == 1
    lines = (failed.stdout + failed.stderr).splitlines()
    (said,) = {line.strip() for line in lines if VARIABLE in line}
    assert not any("Traceback" in line for line in lines)
    return said


def cubins(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as packed:
        assert len(set(packed.namelist())) == len(packed.namelist())
        return {name: packed.read(name) for name in packed.namelist() if name.endswith(cache.SUFFIX)}


def without(folder: Path, module: str) -> Path:
    """Return a folder that hides a module from each Python that searches there first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("targets", [None, ""], ids=["unset", "empty"])
def test_wheel_holds_no_cubin_by_itself(tmp_path: Path, targets: str | None) -> None:
    done = built(tmp_path, targets, without(tmp_path / "hidden", "torch"))
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert cubins(wheel) == {}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("torch", "torch not found: build with --no-build-isolation where rl-kernels-core[cuda] is installed"),
        ("cuda.bindings", "rl-kernels compile: cuda-bindings is not installed: pip install 'rl-kernels-core[cuda]'"),
    ],
)
def test_what_compiles_is_missing(tmp_path: Path, module: str, message: str) -> None:
    said = told(built(tmp_path, "sm_90", without(tmp_path / "hidden", module)))
    assert said == f"{VARIABLE}='sm_90': {message}"
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_wheel_brings_the_cubins_that_are_looked_for(tmp_path: Path) -> None:
    before = sorted(PACKAGE.rglob(f"*{cache.SUFFIX}"))
    done = built(tmp_path, "sm_90")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    found = cubins(wheel)
    backends = [b for b in kernel_registry.load("fused_logp").backends if b.name.startswith("cuda-")]
    programs = [program for backend in backends for program in backend.load().programs("sm_90")]
    assert set(found) == {CUBINS + cache.shipped_name(program, inputs_of(program)) for program in programs}
    assert all((cache.unsealed(content) or b"").startswith(b"\x7fELF") for content in found.values())
    assert sorted(PACKAGE.rglob(f"*{cache.SUFFIX}")) == before


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("sm90", "expected a target such as sm_80 or sm_90a, or all, got 'sm90'"),
        ("sm_1", "got 'sm_1'"),
        ("sm_80a", "there are no kernels for sm_80a"),
    ],
)
def test_bad_target(tmp_path: Path, target: str, message: str) -> None:
    said = told(built(tmp_path, target))
    assert said.startswith(f"{VARIABLE}={target!r}: ")
    assert said.endswith(message)
    assert not list(tmp_path.glob("*.whl"))
