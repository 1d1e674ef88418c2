"""Choose a backend for a call, or say why not; force one; record what was chosen.

The choice is the first backend, in the operator's order of priority, that can run the call and keeps the promises of
the operator. State is plain module variables, because torch.compile guards those and cannot trace a ContextVar: what is
forced is forced in all threads of the process. The environment is read once, at import.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

import torch

from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.registry import PUBLISHED, kernel_registry

T = TypeVar("T")
AUTO = "auto"
KEPT = 4096
"""Kinds of calls whose choice is remembered."""


class BackendUnavailable(ValueError):
    """The backend that was asked for, or every backend, cannot run this call; the message says why."""


class EnvironmentMistake(ValueError):
    """A variable of the environment has a value that means nothing; the message names it, in one line."""


@dataclass(frozen=True)
class Choice:
    """One dispatch: which backend ran which operator, and whether it was forced."""

    operator: str
    backend: str
    device: str
    forced: bool


@dataclass(frozen=True)
class Verdict:
    """One line of ``explain``: a backend with ``chosen`` or the reason it was not."""

    backend: str
    reason: str | None
    chosen: bool

    def __str__(self) -> str:
        return f"{self.backend}: {'chosen' if self.chosen else self.reason or 'can run, comes after the chosen one'}"


def _canonical(operator: str, where: str) -> str:
    for name, published in PUBLISHED.items():
        if operator in published["aliases"]:
            return name
    if operator in PUBLISHED or operator in kernel_registry.names():
        return operator
    known = ", ".join(sorted({*PUBLISHED, *kernel_registry.names()}))
    raise ValueError(f"{where}: {operator!r} is no operator; known: {known}")


def parse_forced(text: str) -> dict[str, str]:
    """Parse ``linear_logp=triton,grpo_loss=native``, the form of ``RL_KERNELS_BACKEND``."""
    forced = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, backend = item.partition("=")
        if not equals or not name or not backend:
            raise ValueError(f"RL_KERNELS_BACKEND: expected operator=backend[,operator=backend], got {text!r}")
        forced[_canonical(name.strip(), "RL_KERNELS_BACKEND")] = backend.strip()
    return forced


def _read_environment() -> tuple[dict[str, str], str | None]:
    """Return what the environment forces, or what is wrong with it, which a command must live to say."""
    try:
        return parse_forced(os.environ.get("RL_KERNELS_BACKEND", "")), None
    except ValueError as error:
        return {}, str(error)


_environment, _mistake = _read_environment()
_blocks: tuple[Mapping[str, str], ...] = ()
"""What each active ``use_backend`` forces, the last entered last; replaced as a whole, so that readers need no lock."""
_entering = Lock()
_strict: bool = os.environ.get("RL_KERNELS_STRICT", "0") not in ("", "0")
_logs: list[list[Choice]] = []
_remembering: list[dict[tuple[object, ...], Any]] = []
"""What each of the functions remembers that ``remembered_choice`` and its like made."""


class use_backend:
    """Force backends inside a ``with`` block; ``auto`` lifts an outer choice.

    ``use_backend(linear_logp="triton", grpo_loss="native")``. An explicit ``backend=`` on a call wins over it. A block
    holds for the whole process: calls of other threads (a backward pass runs in one) are forced too while it is active.
    Of the active blocks that name an operator, the one that was entered last decides.

    Raises:
        ValueError: a keyword is no operator.
    """

    def __init__(self, **backends: str) -> None:
        self._backends = {_canonical(name, "use_backend"): backend for name, backend in backends.items()}

    def __enter__(self) -> None:
        """Force the backends."""
        global _blocks
        with _entering:
            _blocks = (*_blocks, self._backends)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take back what this block forced, whatever other threads have entered or left in between."""
        global _blocks
        with _entering:
            last = max(place for place, block in enumerate(_blocks) if block is self._backends)
            _blocks = (*_blocks[:last], *_blocks[last + 1 :])


def check_environment() -> None:
    """Raise ``EnvironmentMistake`` if ``RL_KERNELS_BACKEND`` is malformed."""
    if _mistake is not None:
        raise EnvironmentMistake(_mistake)


@contextmanager
def record_dispatch() -> Iterator[list[Choice]]:
    """Collect every choice made inside the block, oldest first."""
    log: list[Choice] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs[:] = [other for other in _logs if other is not log]


def reason_against(backend: Backend, call: Call) -> str | None:
    """Say why the automatic choice may not take this backend for this call, or return None."""
    reason = backend.why_not(call)
    if reason is not None:
        return reason
    if call.device.type in backend.by_name:
        return f"on {call.device.type} it runs only if it is asked for by name"
    if not backend.promises[call.device.type] >= INVARIANT:
        missing = sorted(INVARIANT - backend.promises[call.device.type])
        return f"does not promise {', '.join(missing)} on {call.device.type}; ask for it by name to use it all the same"
    if _strict and backend.name == "native" and call.device.type == "cuda":
        return "RL_KERNELS_STRICT forbids the native backend on a GPU"
    return None


def choose(operator: Operator, call: Call, backend: str | None = None) -> Backend:
    """Return the backend that runs this call, and record it.

    Args:
        operator: whose backend.
        call: device, dtype, arch and traits of the tensors.
        backend: a name forces that backend; ``"auto"`` chooses whatever is forced elsewhere; None respects
            ``use_backend`` and ``RL_KERNELS_BACKEND``.

    Raises:
        ValueError: no backend has that name.
        EnvironmentMistake: ``RL_KERNELS_BACKEND`` is malformed.
        BackendUnavailable: the forced backend, or all, cannot run the call.
    """
    wanted = _wanted(operator.name) if backend is None else backend
    chosen = _first(operator, call) if wanted == AUTO else _named(operator, call, wanted)
    for log in _logs:
        log.append(Choice(operator.name, chosen.name, call.device.type, wanted != AUTO))
    return chosen


def remembered_choice(prepare: Callable[..., str]) -> Callable[..., str]:
    """Have a function check arguments and choose a backend once for arguments of each kind.

    It looks at type, shape, strides, dtype and device of a tensor, at whether it is lazily negated, at the value of
    everything else, and at nothing more; it returns the name of what ``choose`` gave, or raises. Nothing is remembered
    under torch.compile, where a graph has guards of its own, while choices are recorded, and where a backend is forced
    outside of the call.
    """
    return _remembered(prepare, prepare)


def planned_choice(plan: Callable[..., Any]) -> Callable[[Callable[..., str]], Callable[..., tuple[str, Any]]]:
    """Return a decorator as ``remembered_choice``: the function returns the name and what was planned with it.

    Args:
        plan: called with the name and the arguments where the choice is to be remembered; what it returns is for
            arguments of that kind. Where nothing is remembered, nothing is planned: that is None.
    """

    def decorate(prepare: Callable[..., str]) -> Callable[..., tuple[str, Any]]:
        @functools.wraps(prepare)
        def planned(*args: object) -> tuple[str, Any]:
            name = prepare(*args)
            return name, plan(name, *args)

        return _remembered(planned, lambda *args: (prepare(*args), None))

    return decorate


def remembered_plan(make: Callable[..., T | None]) -> Callable[..., T | None]:
    """Have a function check arguments and plan a call once for arguments of each kind, as ``remembered_choice`` does.

    It returns the plan, or None: for a kind that has no plan, and where nothing is remembered, without a look at the
    arguments. A caller has a general path beside it, which checks and chooses for itself.
    """
    found = _remembered(lambda *args: (make(*args),), lambda *args: (None,))
    return functools.wraps(make)(lambda *args: found(*args)[0])


def forget() -> None:
    """Forget every choice and plan that is remembered, where other backends take the place of those that made them."""
    for known in _remembering:
        known.clear()


def _remembered(first: Callable[..., T], always: Callable[..., T]) -> Callable[..., T]:
    """Return a function that calls ``first`` once for each kind of arguments, or ``always`` where nothing is kept."""
    known: dict[tuple[object, ...], T] = {}
    _remembering.append(known)

    @functools.wraps(first)
    def chosen(*args: object) -> T:
        if _blocks or _logs or _environment or _mistake or torch.compiler.is_compiling():
            return always(*args)
        # A layout without strides, such as a sparse one, raises. True is 1, and an argument may be either.
        try:
            kinds = [
                None
                if x is None
                else (type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg())
                if isinstance(x, torch.Tensor)
                else (type(x), x)
                for x in args
            ]
            key = (_strict, *kinds)
            found = known.get(key)
        except (TypeError, RuntimeError):
            # What has no hash, such as a list or a size that is a symbol; a tensor without strides.
            return always(*args)
        if found is None:
            found = first(*args)
            if len(known) >= KEPT:
                known.clear()
            known[key] = found
        return found

    return chosen


def _wanted(operator: str) -> str:
    """Return the backend that is forced outside of the call, or ``auto``."""
    check_environment()
    for block in reversed(_blocks):
        if operator in block:
            return block[operator]
    return _environment.get(operator, AUTO)


def _named(operator: Operator, call: Call, name: str) -> Backend:
    backend = operator.backend(name)
    reason = backend.why_not(call)
    if reason is not None:
        raise BackendUnavailable(f"backend: {operator.name} cannot run on {name!r}: {reason}")
    return backend


def _first(operator: Operator, call: Call) -> Backend:
    if call.device.type == "meta":
        hint = "torch._subclasses.fake_tensor.FakeTensorMode gives shapes"
        raise BackendUnavailable(f"backend: {operator.name}: tensors on meta hold no values; {hint}")
    reasons = []
    for backend in operator.backends:
        reason = reason_against(backend, call)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise BackendUnavailable(f"backend: no backend of {operator.name} can run this call; " + "; ".join(reasons))


def explain_call(operator: Operator, call: Call) -> list[Verdict]:
    """Return a verdict on every backend of an operator for a described call, in order of priority."""
    verdicts: list[Verdict] = []
    taken = False
    for backend in operator.backends:
        reason = reason_against(backend, call)
        verdicts.append(Verdict(backend.name, reason, chosen=reason is None and not taken))
        taken = taken or reason is None
    return verdicts


def explain(op: str, *args: object, **kwargs: object) -> list[Verdict]:
    """Return a verdict on every backend for a call of the operator ``op`` with these arguments; nothing runs."""
    operator = kernel_registry.load(op)
    return explain_call(operator, operator.describe(*args, **kwargs))
