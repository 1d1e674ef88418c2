"""Call an implementation on copies of the inputs, and turn whatever it does into named results or a clear failure."""

from __future__ import annotations

import copy
import traceback
from collections import namedtuple
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_kernels.core.dispatch import AUTO, BackendUnavailable
from rl_kernels.core.operator import Operator
from rl_kernels.core.testing.spec import Inputs, Spec

Results = dict[str, torch.Tensor]


class Misbehaved(Exception):
    """A candidate did not answer as an operator must; the message says how."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback
        """Of the exception that the candidate raised, if it did."""


def _everything(function: str, argument: str) -> bool:
    return True


@dataclass(frozen=True)
class Candidate:
    """A named implementation of an operator's public functions.

    Attributes:
        name: as on the command line.
        operator: whose implementation.
        call: ``(function name, keyword arguments) -> result``.
        exempt: relation -> why it is not held to it.
        judged_on: relations that it is held to; empty for all.
        takes: ``(function name, argument) -> bool``; calls with an argument that it does not take are skipped.
        implements: the one function that it implements; None for all of the operator's.
        backend: the backend that it calls, if it is one.
    """

    name: str
    operator: Operator
    call: Callable[[str, Inputs], Any]
    exempt: Mapping[str, str] = field(default_factory=dict)
    judged_on: Sequence[str] = ()
    takes: Callable[[str, str], bool] = _everything
    implements: str | None = None
    backend: str | None = None

    def exemption(self, relation: str) -> str | None:
        """Say why it is not held to a relation, or return None."""
        if self.judged_on and relation not in self.judged_on:
            return f"{self.name} is judged on {', '.join(self.judged_on)} only"
        return self.exempt.get(relation)


def backend_candidate(operator: Operator, name: str, backend: str, device_type: str) -> Candidate:
    """Return the public functions of an operator, forced to a backend (or ``auto``), with what it promises there."""

    def call(function: str, inputs: Inputs) -> Any:
        return operator.function(function)(**{"backend": backend, **inputs})

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
    """Return the reference's arguments in FP64; an option that is a dtype is left out, the gold is not rounded."""
    return {name: _fp64(value) for name, value in readable(spec, inputs).items() if not isinstance(value, torch.dtype)}


def _fp64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Run:
    """One call on copies of its inputs: the outputs at once, the gradients when asked for.

    ``leaves`` names the arguments that require grad.
    """

    def __init__(self, call: Callable[[Inputs], Any], spec: Spec, inputs: Inputs, leaves: Collection[str]) -> None:
        # deepcopy keeps strides and offsets, and shares no storage.
        self.inputs = copy.deepcopy(inputs)
        self._leaves = {
            name: value.requires_grad_()
            for name in leaves
            if isinstance(value := self.inputs.get(name), torch.Tensor) and not spec.writes.keys() & inputs.keys()
        }
        # A dict of its own: a candidate that edits its keyword arguments must not hide what it did to the tensors.
        self._attached = guarded("forward", lambda: named(call(dict(self.inputs)), spec.output))
        self.outputs: Results = {name: value.detach().clone() for name, value in self._attached.items()}

    @property
    def kept(self) -> Results:
        """The outputs as they are now, which a later call must not have changed."""
        return {name: value.detach() for name, value in self._attached.items()}

    @property
    def attached(self) -> set[str]:
        """Names of the outputs that carry a gradient."""
        return {name for name, value in self._attached.items() if value.requires_grad}

    def gradients(self, upstream: Mapping[str, torch.Tensor], *, again: bool = False) -> Results:
        """Return ``gradient:NAME`` for each differentiable input, given upstream gradients by output name.

        ``again`` keeps the graph, for a further backward pass.
        """
        detached = upstream.keys() - self.attached
        if detached:
            raise Misbehaved(f"{', '.join(sorted(detached))}: detached, expected an output that carries a gradient")
        outputs = [self._attached[name] for name in upstream]

        def backward() -> Any:
            leaves = list(self._leaves.values())
            return torch.autograd.grad(outputs, leaves, list(upstream.values()), retain_graph=again, allow_unused=True)

        grads = dict(zip(self._leaves, guarded("backward", backward), strict=True))
        missing = [name for name, grad in grads.items() if grad is None]
        if missing:
            raise Misbehaved(f"no gradient for {', '.join(missing)}")
        return {f"gradient:{name}": grad.clone() for name, grad in grads.items()}

    def results(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Return outputs and, if there is an upstream gradient, gradients."""
        return {**self.outputs, **(self.gradients(upstream) if upstream and self._leaves else {})}


def named(result: Any, single: str) -> Results:
    """Name the tensors of a result: the fields of a NamedTuple, also of one in it, or ``single`` for a bare tensor."""
    if isinstance(result, torch.Tensor):
        return {single: result}
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        inner = next((field for field in result._fields if hasattr(getattr(result, field), "_fields")), None)
        if inner is not None:
            others = {field: getattr(result, field) for field in result._fields if field != inner}
            flat = {**named(getattr(result, inner), single), **others}
            return named(namedtuple(type(result).__name__, flat)(**flat), single)
        wrong = [field for field in result._fields if not isinstance(getattr(result, field), torch.Tensor)]
        if not wrong:
            return dict(zip(result._fields, result, strict=True))
        raise Misbehaved(f"{', '.join(wrong)}: expected a tensor")
    raise Misbehaved(f"expected a tensor or a NamedTuple of tensors, got {type(result).__name__}")


def guarded(phase: str, run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns; whatever it raises becomes ``Misbehaved``, with the traceback.

    But ``BackendUnavailable``: a backend that says beforehand that a call is beyond it has not misbehaved.
    """
    try:
        return run()
    except (Misbehaved, BackendUnavailable):
        raise
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise Misbehaved(
            f"{phase} raised {type(error).__name__}: {error} ({where.filename}:{where.lineno} in {where.name})",
            "".join(traceback.format_exception(error)),
        ) from error
