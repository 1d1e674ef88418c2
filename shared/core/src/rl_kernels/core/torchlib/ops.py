"""Operators in torch.library: schema, implementation and fake kernel in one place.

``define(OPERATOR)`` registers each schema as ``torch.ops.rl_kernels.<operator>_<name>``. The last argument of an op
names a backend; the op calls the function ``<name>`` of that backend's module, so a compiled graph keeps the choice
that was made for it. In plain eager mode, where no compiler, mode, transform, tracer or profiler observes ops, the
implementation is called directly: PyTorch's dispatcher takes more host time than a launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from rl_kernels.core.operator import Operator
from rl_kernels.core.torchlib.observed import are_plain, ops_are_observed

NAMESPACE = "rl_kernels"

DEVICES = {"CPU": "cpu", "CUDA": "cuda"}

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


class _Native(threading.local):
    depth = 0


_native = _Native()


def define(operator: Operator) -> dict[str, Callable[..., Any]]:
    """Register an operator's raw ops; return functions that call them, by their names in ``operator.schemas``."""
    ops = {}
    for name, schema in operator.schemas.items():
        qualified = f"{operator.name}_{name}"
        _define(qualified + schema)
        op = getattr(getattr(torch.ops, NAMESPACE), qualified).default
        written = _written(op)
        runs = {kind: _implementation(operator, name, kind, written) for kind in DEVICES.values()}
        for key, kind in DEVICES.items():
            _library.impl(qualified, runs[kind], key)
        torch.library.register_fake(f"{NAMESPACE}::{qualified}", _fake(operator.fakes[name]), lib=_library)
        ops[name] = _direct(op, runs["cpu"], runs["cuda"])
    return ops


def _direct(op: Any, on_cpu: Callable[..., Any], on_cuda: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls an op, or directly its implementation if nothing observes ops."""

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or ops_are_observed():
            return op(*args)
        if not are_plain(*args):
            return op(*args)
        like = args[0]
        return on_cuda(*args) if like.is_cuda else on_cpu(*args) if like.is_cpu else op(*args)

    call.__name__ = str(op)
    return call


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


def _implementation(operator: Operator, name: str, device_type: str, written: tuple[int, ...]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        *inputs, backend = args
        kernel = getattr(operator.backend(backend).load(), name)
        for place in written:
            # Autograd does not see a kernel's writes; with a new version, a graph that saved this tensor raises. A
            # tensor of inference mode is in no graph, and has no version.
            if inputs[place] is not None and not inputs[place].is_inference():
                increment_version(inputs[place])
        if backend == "native":
            inputs, kernel = [kernel, *inputs], as_native
        if not torch.is_autocast_enabled(device_type):
            return kernel(*inputs)
        # Inside a backend, autocast would silently turn an FP32 product into BF16. Set directly, because its context
        # manager takes longer than a launch.
        torch.set_autocast_enabled(device_type, False)
        try:
            return kernel(*inputs)
        finally:
            torch.set_autocast_enabled(device_type, True)

    return run


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
    return _direct(getattr(getattr(torch.ops, NAMESPACE), name).default, check, check)


def as_native(kernel: Callable[..., Any], *inputs: Any) -> Any:
    """Call a kernel made of PyTorch ops; while it runs, ``within_native`` is True in this thread."""
    _native.depth += 1
    try:
        return kernel(*inputs)
    finally:
        _native.depth -= 1


def within_native() -> bool:
    """Say whether a native backend runs in this thread: code that replaces PyTorch's ops must not replace its ops."""
    return _native.depth > 0
