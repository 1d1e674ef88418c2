"""Candidates of the checker: our backends, the definition itself, or an implementation in its own process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_kernels.core.dispatch import AUTO
from rl_kernels.core.operator import Operator
from rl_kernels.core.testing.spec import Inputs, Spec, function_of
from rl_kernels.lab.check.guard import Results
from rl_kernels.lab.check.isolation.remote import RemoteRun, Worker
from rl_kernels.lab.check.many import call_in_threads, call_often
from rl_kernels.lab.check.ran import Ran
from rl_kernels.lab.check.run import PLAIN, Run
from rl_kernels.lab.check.surroundings import Surroundings


def _everything(function: str, argument: str) -> bool:
    return True


@dataclass(frozen=True)
class Candidate:
    """A named implementation of an operator's public functions.

    Attributes:
        name: as on the command line.
        operator: the operator that it implements.
        call: ``(function name, keyword arguments) -> result``.
        exempt: relation -> why it is not checked.
        judged_on: relations that are checked; empty for all.
        takes: ``(function name, argument) -> bool``; calls with an argument that it does not take are skipped.
        implements: the one function that it implements; None for all functions of the operator.
        backend: the backend that it calls, if it is one.
        worker: the process in which it is called, if not this one.
    """

    name: str
    operator: Operator
    call: Callable[[str, Inputs], Any]
    exempt: Mapping[str, str] = field(default_factory=dict)
    judged_on: Sequence[str] = ()
    takes: Callable[[str, str], bool] = _everything
    implements: str | None = None
    backend: str | None = None
    worker: Worker | None = None

    def run(
        self, function: str, output: str, inputs: Inputs, leaves: Collection[str] = (), around: Surroundings = PLAIN
    ) -> Ran:
        """Call one of the functions on copies of the inputs; ``leaves`` require grad.

        Raises:
            Misbehaved: it gave no valid result.
        """
        if self.worker is not None:
            return RemoteRun(self.worker, output, inputs, list(leaves), around)
        return Run(lambda kwargs: self.call(function, kwargs), output, inputs, leaves, around)

    def many(
        self, function: str, output: str, inputs: Sequence[Inputs], calls: int, seconds: float
    ) -> tuple[Results, Results, int]:
        """Call many times, cycling through the inputs; return what ``many.call_often`` returns.

        Raises:
            Misbehaved: a call gave no valid result.
        """
        if self.worker is not None:
            answer = self.worker.ask("many", inputs=list(inputs), output=output, calls=calls, seconds=seconds)
        else:
            answer = call_often(lambda kwargs: self.call(function, kwargs), output, inputs, calls, seconds)
        return answer["first"], answer["other"], answer["number"]

    def threads(self, function: str, output: str, inputs: Sequence[Inputs], calls: int) -> list[Results]:
        """Call on each of the inputs in its own thread; return the expected and the actual result of each, in turn.

        Raises:
            Misbehaved: a call gave no valid result.
        """
        if self.worker is not None:
            return self.worker.ask("threads", inputs=list(inputs), output=output, calls=calls)
        return call_in_threads(lambda kwargs: self.call(function, kwargs), output, inputs, calls)

    def is_slow(self, device_type: str) -> bool:
        """Return whether calls run in Triton's interpreter, a thousand times slower than usual."""
        return self.backend == "triton" and device_type == "cpu"

    def exemption(self, relation: str) -> str | None:
        """Return the reason why a relation is not checked, or None."""
        if self.judged_on and relation not in self.judged_on:
            return f"{self.name} is judged on {', '.join(self.judged_on)} only"
        return self.exempt.get(relation)


def backend_candidate(operator: Operator, name: str, backend: str, device_type: str) -> Candidate:
    """Return an operator's functions on a backend (or ``auto``), exempt from relations that it does not promise."""

    def call(function: str, inputs: Inputs) -> Any:
        return function_of(operator, function)(**{"backend": backend, **inputs})

    exempt: dict[str, str] = {}
    if backend != AUTO:
        promises = operator.backend(backend).promises[device_type]
        needed = {"invariance": "invariant", "repeatability": "repeatable", "gradients": "differentiable"}
        exempt = {
            relation: f"does not promise to be {promise} on {device_type}"
            for relation, promise in needed.items()
            if promise not in promises
        }
    return Candidate(name, operator, call, exempt, backend=backend)


def reference_candidate(operator: Operator, spec: Spec) -> Candidate:
    """Return the definition itself, in the tested dtype."""

    def call(function: str, inputs: Inputs) -> Any:
        return spec.references[function](**readable(spec, inputs))

    return Candidate("pytorch", operator, call, judged_on=("accuracy", "gradients"))


def readable(spec: Spec, inputs: Inputs) -> Inputs:
    """Return the arguments that the reference takes."""
    return {name: value for name, value in inputs.items() if name not in spec.unread}


def gold_inputs(spec: Spec, inputs: Inputs) -> Inputs:
    """Return the reference's arguments in FP64, without output dtypes: the gold is not rounded."""
    return {name: _fp64(value) for name, value in readable(spec, inputs).items() if not isinstance(value, torch.dtype)}


def _fp64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
