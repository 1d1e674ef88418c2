"""A user's own implementation as a candidate of the checker, called in a process of its own."""

from __future__ import annotations

import inspect
from typing import Any

from rl_kernels.core.operator import Operator
from rl_kernels.core.testing import Inputs, spec_of
from rl_kernels.lab.check.candidate import Candidate
from rl_kernels.lab.check.guard import Misbehaved
from rl_kernels.lab.check.isolation.remote import TIMEOUT, Worker

JUDGED_ON = ("accuracy", "gradients", "repeatability", "invariance", "hygiene")
"""Relations that say something about results; how errors are worded, and the rest, is ours."""
_REQUIRED = inspect.Parameter.empty


def user_candidate(operator: Operator, target: str, timeout: float = TIMEOUT) -> Candidate:
    """Return a user's implementation, ``MODULE:CALLABLE`` or ``path/to/file.py:callable``, under that name.

    One that is called like another public function of the operator is held to that function's cases, and any other to
    the operator's own; the other functions' cases are skipped. It gets the options that its signature names.

    Raises:
        ValueError: the module cannot be imported, or holds no such callable.
    """
    worker = Worker(target, timeout)
    try:
        described = worker.start()
    except Misbehaved:
        # Its process ended, or hung: every call will fail, and say so.
        described = {"name": "", "takes": None}
    public = {case.function for case in spec_of(operator).cases}
    implemented = described["name"] if described["name"] in public else ""
    taken = None if described["takes"] is None else frozenset(described["takes"])

    def call(function: str, inputs: Inputs) -> Any:
        raise NotImplementedError("it is called in its own process only")

    def takes(function: str, argument: str) -> bool:
        optional = inspect.signature(operator.function(function)).parameters[argument].default is not _REQUIRED
        return not optional or taken is None or argument in taken

    return Candidate(target, operator, call, judged_on=JUDGED_ON, takes=takes, implements=implemented, worker=worker)
