"""Run pytest in this process with one module edited; nothing is written to the tree.

``python -m rl_kernels.lab.mutate.child MUTANT OUT PYTEST-ARGUMENTS``: MUTANT is JSON with the module, the place and the
new text, or ``null``. OUT gets pytest's exit status and its first failure.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rl_kernels.lab.mutate.edits import Edit


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with an edit of its source."""

    def __init__(self, module: str, edit: Edit) -> None:
        self._module, self._edit = module, edit

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as usual, and load it with this loader."""
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        return importlib.util.spec_from_loader(fullname, self, origin=spec.origin) if spec else None

    def exec_module(self, module: ModuleType) -> None:
        """Run the edited source; Triton reads it from the cache of lines."""
        origin = str(module.__spec__ and module.__spec__.origin)
        text = self._edit.applied(Path(origin).read_text(encoding="utf-8"))
        module.__file__, file = origin, f"<{self._module}, mutated>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), vars(module))


class First:
    """A pytest plugin that stores the first failure."""

    failure: dict[str, str] | None = None

    def pytest_exception_interact(self, node: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """Store the first failure."""
        if self.failure is None and call.excinfo is not None:
            message = str(call.excinfo.value)[:2000]
            self.failure = {"where": node.nodeid, "type": call.excinfo.typename, "message": message}


def main(argv: Sequence[str]) -> int:
    """Run pytest; return its exit status."""
    mutant, out, *arguments = argv
    mutation = json.loads(mutant)
    if mutation is not None:
        sys.meta_path.insert(0, Mutated(mutation["module"], Edit(*mutation["edit"])))
    first = First()
    status = int(pytest.main(arguments, plugins=[first]))
    Path(out).write_text(json.dumps({"status": status, "first": first.failure}), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
