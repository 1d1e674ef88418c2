"""Source distributions, outside the tree: each gives the wheel that the tree gives."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECTS = sorted(file.parent for place in ("shared", "packages") for file in ROOT.glob(f"{place}/*/pyproject.toml"))
CUDA = [folder for folder in PROJECTS if list(folder.glob("src/rl_kernels/*/backends/*/*.cu"))]

pytestmark = pytest.mark.slow


def named(folder: Path) -> str:
    return folder.name


def sdist(folder: Path, out: Path) -> Path:
    command = (sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(out))
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (made,) = out.glob("*.tar.gz")
    return made


def wheel_of(source: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    options = ("--no-build-isolation", "--no-deps", "--no-cache-dir", "--no-index", "--wheel-dir", str(out))
    command = (sys.executable, "-m", "pip", "wheel", *options, str(source))
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist() if "__pycache__" not in name}


@pytest.mark.parametrize("folder", PROJECTS, ids=named)
def test_sdist_gives_the_wheel_of_the_tree(folder: Path, wheels: Path, tmp_path: Path) -> None:
    done = wheel_of(sdist(folder, tmp_path), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert contents(wheel) == contents(wheels / wheel.name)


def test_sdist_refuses_to_leave_out_cubins(tmp_path: Path) -> None:
    done = wheel_of(sdist(CUDA[0], tmp_path), tmp_path, RL_KERNELS_CUBINS="sm_90")
    assert done.returncode == 1
    assert "RL_KERNELS_CUBINS='sm_90': cubins are built in the repository, not from an sdist" in done.stderr


def test_hook_is_the_same_everywhere() -> None:
    assert len({(folder / "hatch_build.py").read_text(encoding="utf-8") for folder in CUDA}) == 1
