"""What several files of tests need."""

import pytest

from rl_kernels.core import dispatch
from rl_kernels.core.cuda import launch


@pytest.fixture
def make_sources(make_kernels, cubins, monkeypatch):
    """Return ``make_kernels`` of a test in which no kernel is loaded yet."""
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(launch, "_modules", {})
    return make_kernels


@pytest.fixture
def clean_dispatch(monkeypatch):
    """Hold a test apart from the environment that the suite runs in, and see that it leaves nothing behind."""
    monkeypatch.setattr(dispatch, "_environment", {})
    monkeypatch.setattr(dispatch, "_strict", False)
    yield
    assert dispatch._blocks == ()
    assert dispatch._logs == dispatch._logs_of_choices == []
