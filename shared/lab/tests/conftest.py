"""What all tests of the checker need."""

import pytest

from rl_kernels.lab.check.relations import determinism


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    """Let repeatability call the toys of these tests some dozen times, not for seconds."""
    monkeypatch.setattr(determinism, "CALLS", 60)
    monkeypatch.setattr(determinism, "AT_ONCE", 5)
