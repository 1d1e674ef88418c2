"""What tests of core and lab need: modules that exist for one test, and a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest


@pytest.fixture
def make_module(monkeypatch):
    """Return ``make(name, **members)``, which makes a module that can be imported until the test ends."""

    def make(name, **members):
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.fixture
def run_python():
    """Return ``run(*arguments, **environment)``, which runs a fresh Python and returns what it did."""

    def run(*arguments, **environment):
        command = [sys.executable, *map(str, arguments)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RL_KERNELS_")}
        return subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, timeout=120)

    return run
