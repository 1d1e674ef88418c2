"""Plant a bug in a copy of a backend: the public function then runs the copy, until the block ends."""

from __future__ import annotations

import importlib
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

from rl_kernels.core.calls import forget


@dataclass(frozen=True)
class Bug:
    """A planted bug: ``old``, a fragment that occurs exactly once in the source of a backend, becomes ``new``."""

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutants:
    """Bugs of a backend that its quick cases must catch, each planted in a copy of it.

    Attributes:
        backend: name of the backend.
        modules: dotted names of its modules, each before those that import it; the last is the backend's own.
        bugs: each changes one of the modules.
        cases: names of quick cases that are enough to catch every bug, if testing all takes long; by default all.
    """

    backend: str
    modules: Sequence[str]
    bugs: Sequence[Bug]
    cases: Sequence[str] = ()


@contextmanager
def planted(modules: Sequence[str], bug: Bug) -> Iterator[None]:
    """Run with copies of ``modules`` that contain the bug. List each module before those that import it.

    Raises:
        LookupError: the text that the bug replaces does not occur exactly once in the modules; no failure that a bug
            leads to, or tests would take it for one.
    """
    count = places(modules, bug)
    if count != 1:
        raise LookupError(
            f"bug {bug.name!r}: expected {bug.old!r} once in {', '.join(modules)}, found it {count} times"
        )
    sources = {name: _source(name) for name in modules}
    originals = {name: importlib.import_module(name) for name in modules}
    try:
        for name, text in sources.items():
            _install(name, _copy(name, text.replace(bug.old, bug.new)))
        forget()
        yield
    finally:
        for name, module in originals.items():
            _install(name, module)
        forget()


def places(modules: Sequence[str], bug: Bug) -> int:
    """Return how often the text that the bug replaces occurs in the modules."""
    return sum(_source(name).count(bug.old) for name in modules)


def _source(name: str) -> str:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"{name}: no source to plant a bug in")
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()


def _copy(name: str, text: str) -> ModuleType:
    module = ModuleType(name)
    file = f"<{name}, planted>"
    module.__file__ = file
    module.__package__ = name.rpartition(".")[0]
    # Triton reads a kernel's source here, and a traceback its lines.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    sys.modules[name] = module
    exec(compile(text, file, "exec"), vars(module))
    return module


def _install(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    setattr(sys.modules[parent], leaf, module)
