"""A user's own implementation of an operator, named on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_kernels.core.check.candidate import Candidate
from rl_kernels.core.operator import Operator
from rl_kernels.core.testing import Inputs, spec_of

JUDGED_ON = ("accuracy", "gradients", "repeatability", "invariance", "hygiene")
"""Relations that say something about results; how errors are worded, and the rest, is ours."""
_REQUIRED = inspect.Parameter.empty


def user_candidate(operator: Operator, target: str) -> Candidate:
    """Return a user's implementation, ``MODULE:CALLABLE`` or ``path/to/file.py:callable``, under that name.

    One that is called like another public function of the operator is held to that function's cases, and any other to
    the operator's own; the other functions' cases are skipped.

    Raises:
        ValueError: the module cannot be imported, or holds no such callable.
    """
    implementation = load_callable(target)
    public = {case.function for case in spec_of(operator).cases}
    name = getattr(implementation, "__name__", "")
    implemented = name if name in public else ""
    taken = _parameters(implementation)

    def call(function: str, inputs: Inputs) -> Any:
        return implementation(**inputs)

    def takes(function: str, argument: str) -> bool:
        optional = inspect.signature(operator.function(function)).parameters[argument].default is not _REQUIRED
        return not optional or taken is None or argument in taken

    return Candidate(target, operator, call, judged_on=JUDGED_ON, takes=takes, implements=implemented)


def _parameters(function: Callable[..., Any]) -> set[str] | None:
    """Return the names that a function takes as keywords, None if any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def load_callable(target: str) -> Callable[..., Any]:
    """Import ``MODULE:CALLABLE`` or ``path/to/file.py:callable``.

    Raises:
        ValueError: the module cannot be imported, or holds no such callable.
    """
    source, _, path = target.rpartition(":")
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as error:
        raise ValueError(f"cannot import {source}: {type(error).__name__}: {error}") from error
    found: Any = module
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
    if not callable(found):
        raise ValueError(f"{source} has no callable {path!r}")
    return found


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError("no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Found by name where the file defines dataclasses or is pickled; another module of that name stays what it is.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
