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


@pytest.fixture
def make_kernels(tmp_path, monkeypatch):
    """Return ``make(name, **files)``, which makes a package that holds them; ``__`` is a dot."""

    def make(name, **files):
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
def cubins(tmp_path, monkeypatch):
    """Keep cubins for one test, in a folder of its own, which is returned."""
    from rl_kernels.core.cuda import cache

    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cubins"))
    return tmp_path / "cubins"
