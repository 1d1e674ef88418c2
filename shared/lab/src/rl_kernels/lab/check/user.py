"""A user's own implementation as a candidate of the checker, called in its own process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rl_kernels.core.operator import Operator
from rl_kernels.core.testing import Inputs, function_of, spec_of
from rl_kernels.core.testing.grouped import members
from rl_kernels.lab.check.candidate import Candidate
from rl_kernels.lab.check.guard import Misbehaved
from rl_kernels.lab.check.isolation.remote import TIMEOUT, Worker

JUDGED_ON = ("accuracy", "gradients", "repeatability", "invariance", "hygiene")
"""Relations about results; other relations check error messages and further rules of this project."""
_REQUIRED = inspect.Parameter.empty


def user_candidate(operator: Operator, target: str, timeout: float = TIMEOUT) -> Candidate:
    """Return a user's implementation, ``MODULE:CALLABLE`` or ``path/to/file.py:callable``, under that name.

    A callable with the name of another public function of the operator is checked on that function's cases, any other
    callable on the operator's own; cases of other functions are skipped. It gets the options that its signature names:
    one by one, or grouped as in our function, such as ``objective``.

    Raises:
        ValueError: the module cannot be imported, holds no such callable, or one that no call fits.
    """
    spec = spec_of(operator)
    worker = Worker(target, timeout, spec.groups)
    try:
        described = worker.start()
    except Misbehaved:
        # Its process ended or hung: every call will fail with that message.
        described = {"name": "", "takes": None, "needs": [], "takes_any": True}
    public = {case.function for case in spec.cases}
    implemented = described["name"] if described["name"] in public else ""
    function = function_of(operator, implemented)
    try:
        _check_signature(implemented or operator.name, inspect.signature(function), described)
    except ValueError:
        worker.stop()
        raise
    accepted = None if described["takes"] is None else frozenset(described["takes"])
    if accepted is not None:
        accepted |= {member for name, kind in spec.groups.items() if name in accepted for member in members(kind)}

    def call(function: str, inputs: Inputs) -> Any:
        raise NotImplementedError("it is called only in its own process")

    def takes(function: str, argument: str) -> bool:
        optional = inspect.signature(function_of(operator, function)).parameters[argument].default is not _REQUIRED
        return not optional or accepted is None or argument in accepted

    return Candidate(target, operator, call, judged_on=JUDGED_ON, takes=takes, implements=implemented, worker=worker)


def _check_signature(name: str, ours: inspect.Signature, described: Mapping[str, Any]) -> None:
    """Raise if the calls of our function cannot fit an implementation."""
    required = [parameter.name for parameter in ours.parameters.values() if parameter.default is _REQUIRED]
    needs, named = described["needs"], described["takes"] or ()
    unnamed = [
        argument for argument in required if argument not in named and (argument in needs or not described["takes_any"])
    ]
    extra = [argument for argument in needs if argument not in required]
    faults = [f"{argument} is {'positional-only' if argument in needs else 'missing'}" for argument in unnamed]
    faults += [
        f"{argument} is required, but calls may leave it out" for argument in extra if argument in ours.parameters
    ]
    faults += [
        f"{argument} is required, but {name} has no such argument"
        for argument in extra
        if argument not in ours.parameters
    ]
    if faults:
        takes = ", ".join(described["takes"]) or "no keywords"
        raise ValueError(
            f"{name} is called with {', '.join(required)} by name, and options; it takes {takes}: {'; '.join(faults)}"
        )
