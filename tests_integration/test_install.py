"""What a user gets: wheels that are whole, and imports that are silent; `nox -s build` installs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
OPERATORS = [folder.name.replace("-", "_") for folder in PACKAGES if folder.name not in ("rl-kernels", "models")]

pytestmark = pytest.mark.slow


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def test_wheels_are_pure_python_and_whole(wheels: Path) -> None:
    names = [wheel.name for wheel in wheels.iterdir()]
    assert len(names) == 2 + len(PACKAGES)
    assert all(name.endswith("-py3-none-any.whl") for name in names)


def test_import_is_silent_and_light() -> None:
    """Each part by itself: in a copy of a process that has imported PyTorch alone."""
    code = (
        "import importlib, os, sys, torch; before = set(sys.modules)\n"
        "name = next((name for name in sys.argv[1:] if not os.fork()), None)\n"
        "if name is None: sys.exit(max(os.wait()[1] for _ in sys.argv[1:]) > 0)\n"
        "importlib.import_module(f'rl_kernels.{name}')\n"
        "assert not {'triton', 'cuda.core', 'cuda.bindings'} & (set(sys.modules) - before), name\n"
        "assert not torch.cuda.is_initialized(), name"
    )
    specs = [f"{name}.spec.cases" for name in OPERATORS]
    done = run(sys.executable, "-W", "error", "-c", code, "core", "lab", *OPERATORS, *specs, "models", "demo")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
