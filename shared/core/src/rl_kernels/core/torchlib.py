"""Operators in torch.library: schema, implementation and fake kernel in one place, and first-order gradients.

``define(OPERATOR)`` registers each schema as ``torch.ops.rl_kernels.<operator>_<name>``. The last argument of an op
names a backend; the op calls the function ``<name>`` of that backend's module, so a compiled graph keeps the choice
that was made for it. In plain eager mode, where no compiler, mode, transform, tracer or profiler observes ops, the
implementation is called directly: PyTorch's dispatcher takes more host time than a launch.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch._C import (
    _dispatch_tls_is_dispatch_key_included,
    _functorch,
    _get_tracing_state,
    _is_torch_function_mode_enabled,
    _len_torch_dispatch_stack,
    _parse_dispatch_key,
)
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from rl_kernels.core.operator import Operator

NAMESPACE = "rl_kernels"
DEVICES = {"CPU": "cpu", "CUDA": "cuda"}
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype})
"""Types of arguments that the dispatcher passes on unchanged."""

CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that autocast casts from."""

# The vmap of torch.autograd.grad(..., is_grads_batched=True). Parsed once: looking a key up by name takes 3 us.
_BATCHES: Any = _parse_dispatch_key("VmapMode")
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


def are_plain(*values: Any) -> bool:
    """Say whether a kernel may read these values directly: no wrapper subclass, and no lazily negated view."""
    # PyTorch's dispatcher materializes such a view. A list, because a generator takes longer.
    return all([type(x) in PLAIN and not (isinstance(x, torch.Tensor) and x.is_neg()) for x in values])


def ops_are_observed() -> bool:
    """Say whether ops that are called now are observed, by a profiler or by anything that ``is_traced`` detects."""
    return is_traced() or _profiler_enabled()


def is_traced() -> bool:
    """Say whether a mode, a transform of ``torch.func`` such as vmap, or a tracer is active."""
    return (
        _len_torch_dispatch_stack() > 0
        or _functorch.maybe_current_level() is not None
        or _dispatch_tls_is_dispatch_key_included(_BATCHES)
        or _is_torch_function_mode_enabled()
        or _get_tracing_state() is not None
    )


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


def as_native(kernel: Callable[..., Any], *inputs: Any) -> Any:
    """Call a kernel made of PyTorch ops; meanwhile ``within_native`` is True in this thread."""
    _native.depth += 1
    try:
        return kernel(*inputs)
    finally:
        _native.depth -= 1


def within_native() -> bool:
    """Say whether a native backend runs in this thread: code that replaces PyTorch's ops must not replace its ops."""
    return _native.depth > 0


def _fake(fake: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return fake(*args[:-1])

    return run


class _FirstOrder(torch.autograd.Function):
    """A backward op whose own backward raises: a second derivative must never be silently zero."""

    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], *args: Any) -> Any:
        ctx.name = op.__name__
        return op(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{ctx.name}: double backward is not supported")


def first_order(op: Callable[..., Any], *args: Any) -> Any:
    """Call a raw backward op so that differentiating its result raises ``RuntimeError``."""
    no_lost_derivatives(op.__name__, *args)
    # With gradients off, as in a backward pass without create_graph, nothing can differentiate the result.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return op(*args)
    return _FirstOrder.apply(op, *args)


def is_asked_for(ctx: Any, number: int) -> bool:
    """Say whether the running backward pass needs the gradient of an argument of an autograd Function.

    ``ctx.needs_input_grad`` only says whether a pass may need it: ``torch.autograd.grad(loss, hidden)`` needs the
    gradient of hidden alone.

    Args:
        ctx: the Function's context, in its ``backward``.
        number: index of the argument among the tensor arguments.
    """
    if torch.compiler.is_compiling():
        return True
    try:
        asked: bool = torch._C._will_engine_execute_node(ctx.next_functions[number][0])
    except RuntimeError:
        # PyTorch raises for a leaf whose gradient ``torch.autograd.grad`` returns.
        return True
    return asked


def may_overwrite(saved: torch.Tensor) -> bool:
    """Say whether the running backward pass may write to a tensor that its Function saved: nobody reads it again.

    A pass with ``retain_graph`` or ``create_graph`` keeps the graph for another one, and under ``is_grads_batched``
    (vmap) one tensor serves many gradients. Memory of inference mode, from a hook for saved tensors, is not ours.
    """
    if torch.compiler.is_compiling() or is_traced() or not are_plain(saved) or saved.is_inference():
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def no_lost_derivatives(name: str, *values: Any) -> None:
    """Raise where an unsupported derivative would be lost silently.

    Unsupported are forward-mode AD, the gradient transforms of ``torch.func``, and gradients through
    ``torch.func.vmap``: inside them a tensor does not show that it requires grad.

    Args:
        name: name of the operator, for the message.
        values: its arguments; only tensors are looked at.

    Raises:
        RuntimeError: an argument carries a tangent of ``torch.func.jvp`` or ``torch.autograd.forward_ad``; or gradients
            are on inside ``torch.func.grad`` or a vmap, and an argument requires grad. Under torch.compile any call
            inside them raises.
    """
    # Check the level first: every call comes here, and few are inside forward-mode AD.
    if forward_ad._current_level >= 0 and (torch.compiler.is_compiling() or any(map(_has_tangent, values))):
        raise RuntimeError(f"{name}: forward-mode AD is not supported")
    around = _transform()
    # Under torch.compile we cannot see what a tensor wraps.
    if around and torch.is_grad_enabled() and (torch.compiler.is_compiling() or any(map(_requires_grad, values))):
        hint = "" if around == "vmap" else "; torch.autograd.grad and .backward() are"
        raise RuntimeError(f"{name}: gradients through {around} are not supported{hint}")


def _has_tangent(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    # We cannot tell which transform wrapped it; a tensor that no transform depends on is not wrapped.
    wrapped = _functorch.is_functorch_wrapped_tensor(value)
    return wrapped or forward_ad.unpack_dual(value).tangent is not None


def _transform() -> str:
    """Name the active transform of ``torch.func`` that gradients cannot pass through, or return ""."""
    if _functorch.maybe_current_level() is None:
        return ""
    kinds = {one.key() for one in _functorch.get_interpreter_stack() or ()}
    if _functorch.TransformType.Vmap in kinds:
        return "vmap"
    return "torch.func.grad" if _functorch.TransformType.Grad in kinds else ""


# torch.compile calls this while it traces, and takes the result as constant: it traces each vmap anew. This is what
# torch.compiler.assume_constant_result does, without importing the compiler.
_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _requires_grad(value: Any) -> bool:
    """Say whether a tensor, or one that it wraps, requires grad."""
    if not isinstance(value, torch.Tensor):
        return False
    while not value.requires_grad and _functorch.is_functorch_wrapped_tensor(value):
        value = _functorch.get_unwrapped(value)
    return value.requires_grad


def define_check(name: str, schema: str, check: Callable[..., None]) -> Callable[..., Any]:
    """Register a check of a tensor's values as an op, so that fake and meta tensors pass it; return the op.

    The first argument is the tensor; the op returns an empty tensor, because an op must return something.
    """

    def run(value: torch.Tensor, *args: Any) -> torch.Tensor:
        check(value, *args)
        return value.new_empty(0)

    _define(f"{name}{schema} -> Tensor")
    for key in DEVICES:
        _library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda value, *args: value.new_empty(0), lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def values_hidden(value: torch.Tensor) -> bool:
    """Say whether a tensor's values cannot be read now: under torch.compile, or while a CUDA graph is captured."""
    return torch.compiler.is_compiling() or (value.is_cuda and torch.cuda.is_current_stream_capturing())


def scalar(value: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a tensor without dims on the CPU, which a kernel reads without a launch or a sync.

    Do not write to it: in eager mode the next call with this number gets the same tensor.
    """
    # Made a float first, because torch takes no integer of more than 64 bits.
    if torch.compiler.is_compiling():
        # A product, unlike torch.full, stays one graph when the number varies from call to call.
        return torch.ones((), dtype=dtype, device="cpu") * (value * 1.0)
    value = value * 1.0
    return _made()(value, math.copysign(1.0, value), dtype)


def scalars(*values: float) -> torch.Tensor:
    """Return numbers as one FP64 tensor ``[n]`` on the CPU, as ``scalar`` does, at the cost of one call."""
    if torch.compiler.is_compiling():
        return torch.stack([scalar(value, torch.float64) for value in values])
    return _made()(values, tuple(map(math.copysign, repeat(1.0), values)), torch.float64)


def _numbers(values: float | tuple[float, ...], _: float | tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of numbers. The signs are an argument too, because 0.0 and -0.0 are the same key of a cache."""
    # A tensor made in inference mode could not be saved for backward.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device="cpu")


_cached_numbers = functools.lru_cache(maxsize=1024)(_numbers)


def _made() -> Callable[..., torch.Tensor]:
    # Under a mode the tensor may be of another type, which must not be cached.
    return _numbers if ops_are_observed() else _cached_numbers


def scalar_or_rows(value: float | torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as ``scalar`` does, or a tensor ``[...]`` as one value per row ``[rows]``, in ``dtype``.

    A tensor without dims is expanded, because reading it as a number would sync with a GPU.
    """
    if not isinstance(value, torch.Tensor):
        return scalar(value, dtype)
    return value.to(dtype).reshape(-1) if value.ndim else value.to(dtype).expand(rows)


def autocast_dtype(x: object) -> torch.dtype | None:
    """Return the dtype to which autocast casts the operands of ``F.linear`` on the device of ``x``, or None."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return None
    # Asking torch.amp which devices have autocast breaks the graph under torch.compile before torch 2.13.
    if not isinstance(x, torch.Tensor) or x.device.type not in DEVICES.values():
        return None
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None


def autocast_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cast the operands of a linear layer as autocast does for ``F.linear``: differentiably, all but FP64.

    With gradients off, autocast caches its cast of a parameter until its outermost block ends. Operands of dtypes that
    autocast does not cast stay as they are.
    """
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, weight, bias

    def cast(value: Any, *, may_keep: bool) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype == dtype or value.dtype not in CASTABLE:
            return value
        if value.layout != torch.strided:
            return value
        # The cached cast has no gradient, and is freed before a CUDA graph that was captured meanwhile.
        if may_keep and type(value) in PLAIN and not torch.is_grad_enabled() and not values_hidden(value):
            # The one op that autocast casts for and that returns its argument; autocast on the CPU does not know it.
            kept = torch.ops.aten.einsum.default("...", [value])
            if kept.dtype == dtype:
                return kept
        return value.to(dtype)

    return cast(x, may_keep=False), cast(weight, may_keep=True), cast(bias, may_keep=True)
