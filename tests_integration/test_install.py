"""What a user gets: the wheels in fresh environments, and what importing them does."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
OPERATORS = [folder.name.replace("-", "_") for folder in PACKAGES if folder.name not in ("rl-kernels", "models")]

pytestmark = pytest.mark.slow

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="session")
def libraries() -> str:
    """Return the folder that holds torch, and must hold no part of rl-kernels for these tests to mean anything."""
    folder = Path(torch.__file__).parents[1]
    if list(folder.glob("rl_kernels*.dist-info")):
        pytest.skip("rl-kernels is installed beside torch: `nox -s 'tests(integration)'` keeps them apart")
    return str(folder)


@pytest.fixture(scope="session")
def alone(wheels: Path, libraries: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with only core and linear_logp, from their wheels."""
    home = tmp_path_factory.mktemp("alone")
    venv.create(home)
    packages = sysconfig.get_path("purelib", "posix_prefix", {"base": str(home)})
    Path(packages, "borrowed.pth").write_text(libraries + "\n", encoding="utf-8")
    python = home / "bin" / "python"
    chosen = [next(wheels.glob(f"rl_kernels_{name}-*.whl")) for name in ("core", "linear_logp")]
    installed = run(python, "-m", "pip", "install", "--no-index", "--no-deps", *chosen)
    assert installed.returncode == 0, installed.stderr
    return python


def test_wheels_are_pure_python_and_whole(wheels: Path) -> None:
    names = [wheel.name for wheel in wheels.iterdir()]
    assert len(names) == 2 + len(PACKAGES)
    assert all(name.endswith("-py3-none-any.whl") for name in names)


def test_list_shows_what_is_installed(alone: Path) -> None:
    listed = run(alone.with_name("rl-kernels"), "list")
    assert listed.returncode == 0, listed.stderr
    assert [name for name in OPERATORS if name in listed.stdout] == ["linear_logp"]


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
    done = run(sys.executable, "-W", "error", "-c", code, "core", "lab", *OPERATORS, "models", "demo")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_pytest_plugin_imports_no_torch() -> None:
    done = run(sys.executable, "-c", "import rl_kernels.core.pytest_plugin, sys; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr
