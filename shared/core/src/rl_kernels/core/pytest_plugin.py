"""Fixtures and markers for the tests of every package; pytest loads it by entry point.

Torch is imported by the fixtures that need it, not here: pytest loads this module wherever core is installed.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from rl_kernels.core.testing import RLBatch

MARKERS = ("gpu: needs a GPU; skipped without one", "slow: takes more than a few seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, for ``--strict-markers``."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked ``gpu`` where torch sees no GPU."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch sees none")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Free the cached memory of a GPU after a test on it: other processes may test beside this one."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        torch.cuda.empty_cache()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn: the test runs once on the CPU and, marked ``gpu``, once on the GPU."""
    import torch

    return torch.device(request.param)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return a seed made from the test's name: the same in every run, a different one in every test."""
    return zlib.crc32(request.node.name.encode())


@pytest.fixture
def rl_batch(seed: int) -> Callable[..., RLBatch]:
    """Return ``make_synthetic_rl_kernel_batch`` with the test's seed; any argument can be given by name."""
    from rl_kernels.core.testing import make_synthetic_rl_kernel_batch

    def make(**arguments: object) -> RLBatch:
        return make_synthetic_rl_kernel_batch(**{"seed": seed, **arguments})  # type: ignore[arg-type]

    return make


@pytest.fixture
def torch_threads() -> Callable[[int], AbstractContextManager[None]]:
    """Return the context manager ``torch_threads(count)``, which restores the number of threads."""
    from rl_kernels.core.testing import torch_threads

    return torch_threads


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """Run the test with ``torch.empty`` filled with NaN; ``pytest.mark.usefixtures`` does so for a whole module."""
    from rl_kernels.core.testing import poisoned_empty

    with poisoned_empty():
        yield


@pytest.fixture
def make_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return ``make(name, **files)``, which makes a package of them and returns its folder; ``__`` is a dot."""

    def make(name: str, **files: str) -> Path:
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        for file, text in files.items():
            (folder / file.replace("__", ".")).write_text(text)
        monkeypatch.syspath_prepend(folder.parent)
        # So that it is forgotten when the test ends.
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
        return folder

    return make


@pytest.fixture
def cubins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep cubins for one test, in a folder of its own, which is returned."""
    from rl_kernels.core.cuda import cache

    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cubins"))
    return tmp_path / "cubins"
