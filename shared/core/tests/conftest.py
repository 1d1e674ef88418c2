"""What tests of CUDA kernels need."""

import pytest

from rl_kernels.core.cuda import launch


@pytest.fixture
def make_sources(make_kernels, cubins, monkeypatch):
    """Return ``make_kernels`` of a test in which no kernel is loaded yet."""
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(launch, "_modules", {})
    return make_kernels
