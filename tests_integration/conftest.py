"""What several tests across packages need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of every package, with the hatchling that is here."""
    dist = tmp_path_factory.mktemp("dist")
    for folder in (
        file.parent for file in (*ROOT.glob("shared/*/pyproject.toml"), *ROOT.glob("packages/*/pyproject.toml"))
    ):
        built = subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert built.returncode == 0, built.stderr
    return dist


@pytest.fixture
def trainer_of() -> Callable[..., Any]:
    """Return ``small_trainer.trainer_in``; skip where there is no TRL."""
    pytest.importorskip("trl")
    from small_trainer import trainer_in

    return trainer_in
