"""Operators in torch.library: schema, implementation and fake kernel in one place.

``define(OPERATOR)`` registers each schema as ``torch.ops.rl_kernels.<operator>_<name>``. The last argument of an op
names a backend; the op calls the function ``<name>`` of that backend's module, so a compiled graph keeps the choice
that was made for it. In plain eager mode, where no compiler, mode, transform, tracer or profiler observes ops, the
implementation is called directly: PyTorch's dispatcher takes more host time than a launch. Launches that a backend
prepares (``calls.prepared``) are remembered by the kind of their arguments, whoever calls the op.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from rl_kernels.core.calls import Launches, Memory, Ready, kind_of, prepared
from rl_kernels.core.operator import Operator
from rl_kernels.core.torchlib.observed import are_plain, ops_are_observed

NAMESPACE = "rl_kernels"

DEVICES = {"CPU": "cpu", "CUDA": "cuda"}
"""The devices on which ops run, by their keys in PyTorch's dispatcher."""

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


class _Native(threading.local):
    depth = 0


_native = _Native()


class Op:
    """A raw op of an operator.

    Args:
        operator: the operator; its backends have a function of this name.
        name: name of the op in ``operator.schemas``.
        op: the op that is registered with PyTorch.
    """

    def __init__(self, operator: Operator, name: str, op: Any) -> None:
        self._operator, self._name, self._op = operator, name, op
        self.__name__ = str(op)
        self._written = _written(op)
        self._memory = Memory[Launches]()

    def __call__(self, *args: Any) -> Any:
        """Call the op, or its implementation if nothing observes ops; the last argument names a backend."""
        if torch.compiler.is_compiling() or ops_are_observed():
            return self._op(*args)
        # What is remembered has passed the checks below.
        launches = self._memory.get(kind_of(args))
        if launches is None:
            return self.run(*args) if _may_run(args) else self._op(*args)
        if self._written:
            self._count_writes(args)
        return launches(*args[:-1])

    def ready(self, *args: Any) -> Ready:
        """Prepare calls with arguments of this kind, for ``call``; the last argument names a backend."""
        # In this order: torch.compile cannot trace the import of a backend.
        return Ready(args[-1], self._launches(args) if _may_run(args) and kind_of(args) is not None else None)

    def call(self, ready: Ready, *args: Any) -> Any:
        """Call the op with arguments of the kind that ``ready`` was made for, without the backend."""
        if ready.launches is None or ops_are_observed():
            return self(*args, ready.backend)
        if self._written:
            self._count_writes(args)
        return ready.launches(*args)

    def run(self, *args: Any) -> Any:
        """Run the implementation."""
        self._count_writes(args)
        return self._launches(args)(*args[:-1])

    def _count_writes(self, args: tuple[Any, ...]) -> None:
        """Give what the op overwrites a new version: autograd does not see a kernel's writes.

        A graph that saved this tensor then raises. A tensor of inference mode is in no graph, and has no version.
        """
        for place in self._written:
            if args[place] is not None and not args[place].is_inference():
                increment_version(args[place])

    def _launches(self, args: tuple[Any, ...]) -> Launches:
        """Return the backend's function, or the launches that it has prepared for arguments of this kind."""
        kind = kind_of(args)
        launches = self._memory.get(kind)
        if launches is None:
            function: Callable[..., Any] = getattr(self._operator.backend(args[-1]).load(), self._name)
            launches = function.prepare(*args[:-1]) if isinstance(function, prepared) else function
            if args[-1] == "native":
                launches = functools.partial(as_native, launches)
            elif launches is function:
                launches = functools.partial(_without_autocast, launches)
            if kind is not None and are_plain(*args):
                self._memory.add(kind, launches)
        return launches


def define(operator: Operator) -> dict[str, Op]:
    """Register an operator's raw ops; return them by their names in ``operator.schemas``."""
    ops = {}
    for name, schema in operator.schemas.items():
        qualified = f"{operator.name}_{name}"
        _define(qualified + schema)
        op = ops[name] = Op(operator, name, getattr(getattr(torch.ops, NAMESPACE), qualified).default)
        for key in DEVICES:
            _library.impl(qualified, op.run, key)
        torch.library.register_fake(f"{NAMESPACE}::{qualified}", _fake(operator.fakes[name]), lib=_library)
    return ops


def _define(schema: str) -> None:
    try:
        _library.define(schema)
    except RuntimeError as error:
        if "multiple times" not in str(error):
            raise
        message = "rl_kernels was imported before, and a process can register its ops only once: start a new process"
        raise ImportError(message) from error


def _written(op: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that an op overwrites: ``Tensor(a!)`` in its schema."""
    arguments = enumerate(op._schema.arguments)
    return tuple(place for place, argument in arguments if argument.alias_info and argument.alias_info.is_write)


def _may_run(args: tuple[Any, ...]) -> bool:
    """Say whether an implementation may be called without PyTorch's dispatcher."""
    if torch.compiler.is_compiling() or ops_are_observed():
        return False
    return are_plain(*args) and (args[0].is_cuda or args[0].is_cpu)


def _fake(fake: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return fake(*args[:-1])

    return run


def define_check(name: str, schema: str, check: Callable[..., None]) -> Callable[..., Any]:
    """Register a check of a tensor's values as an op, so that fake and meta tensors pass it; return the op.

    The first argument is the tensor; the op returns an empty tensor, because an op must return something. Where nothing
    observes ops, the check is called directly.
    """

    def run(value: torch.Tensor, *args: Any) -> torch.Tensor:
        check(value, *args)
        return value.new_empty(0)

    _define(f"{name}{schema} -> Tensor")
    for key in DEVICES:
        _library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda value, *args: value.new_empty(0), lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    return lambda *args: check(*args) if _may_run(args) else op(*args)


def _without_autocast(kernel: Callable[..., Any], *inputs: Any) -> Any:
    """Call a kernel with autocast off: inside a backend it would silently turn an FP32 product into BF16."""
    device_type = inputs[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return kernel(*inputs)
    # Set directly, because its context manager takes longer than a launch.
    torch.set_autocast_enabled(device_type, False)
    try:
        return kernel(*inputs)
    finally:
        torch.set_autocast_enabled(device_type, True)


def as_native(kernel: Callable[..., Any], *inputs: Any) -> Any:
    """Call a kernel made of PyTorch ops, with autocast off; ``within_native`` is True in this thread meanwhile."""
    _native.depth += 1
    try:
        return _without_autocast(kernel, *inputs) if torch._C._is_any_autocast_enabled() else kernel(*inputs)
    finally:
        _native.depth -= 1


def within_native() -> bool:
    """Say whether a native backend runs in this thread: code that replaces PyTorch's ops must not replace its ops."""
    return _native.depth > 0
