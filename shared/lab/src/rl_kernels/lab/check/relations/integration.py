"""The relation of PyTorch: requirements of its compiler, fake tensors, opcheck and CUDA graphs."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_kernels.core.testing import Case, Inputs
from rl_kernels.core.testing.grouped import grouped, own_parameters
from rl_kernels.core.torchlib.ops import NAMESPACE
from rl_kernels.lab.check import compare
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.compare import Comparison
from rl_kernels.lab.check.guard import Misbehaved, Results, guarded, named
from rl_kernels.lab.check.result import Check, Record
from rl_kernels.lab.check.run import Run

PASSED = Comparison(True)
WARM_UPS = 3
"""Calls before a CUDA graph is captured."""


def integration(cell: Cell) -> Iterator[Record]:
    """Run opcheck on the raw ops; compare fake tensors, a compiled graph and a CUDA graph with eager calls."""
    if cell.candidate.backend is None:
        yield cell.skip("torch", "not a backend of the operator")
        return
    twin = _earlier_case_with_same_graph(cell)
    if twin:
        yield cell.skip("torch", f"the case {twin} makes the same graph")
        return
    parts: list[Callable[[Cell], Iterator[Record]]] = [_opcheck, _fake, _compiled]
    if cell.setting.device.type == "cuda":
        parts += [_no_sync, _graph]
    for part in parts:
        try:
            yield from part(cell)
        except Misbehaved as error:
            yield cell.failed("torch", part.__name__.strip("_").replace("_", " "), error)


def _earlier_case_with_same_graph(cell: Cell) -> str | None:
    """Return the first case before this one that gives the same graph, if there is one.

    Its function, its arguments and its sizes of 1 are the same; in the quick suite, its function and its tensors.
    """
    named = next(
        (case for case in cell.spec.cases if case.name == cell.case.name.removesuffix(", constant")), cell.case
    )
    flags = {name: size for name, size in cell.case.sizes.items() if named.sizes.get(name) != size}

    def form(case: Case) -> tuple[object, ...]:
        inputs = replace(cell, case=case).inputs
        if cell.setting.suite == "quick":
            return case.function, frozenset(name for name, value in inputs.items() if isinstance(value, torch.Tensor))
        ones = frozenset(name for name, size in case.sizes.items() if size == 1)
        return case.function, ones, frozenset(inputs)

    own = form(cell.case)
    for case in cell.spec.cases:
        if case.name == cell.case.name:
            return None
        if form(case.resized({name: size for name, size in flags.items() if name in case.sizes})) == own:
            return case.name
    return None


class RawCalls(TorchDispatchMode):
    """Records the raw ops that are called inside the block, with detached copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record calls into the namespace of the operators."""
        if func.namespace == NAMESPACE:
            copies = [arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            self.calls[str(func)] = (func, tuple(copies))
        return func(*args, **(kwargs or {}))


class Promised(TorchDispatchMode):
    """Compares the results of raw ops that are called inside the block with what their fake kernels promise."""

    def __init__(self) -> None:
        super().__init__()
        self.differing: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an op; of one in the namespace of the operators, also its fake kernel."""
        results = func(*args, **(kwargs or {}))
        if func.namespace == NAMESPACE:
            plain = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
            with FakeTensorMode() as mode:
                promised = func(*(mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in plain))
            layouts, expected = ([_layout(x) for x in tree_leaves(y) if x is not None] for y in (results, promised))
            if layouts != expected:
                self.differing.append(f"{func}: {layouts}, not {expected}")
        return results


def _opcheck(cell: Cell) -> Iterator[Record]:
    with RawCalls() as raw:
        run = cell.run()
        run.results(cell.upstream(run))
    if not raw.calls:
        yield cell.failed("torch", "opcheck", "called no op of this library")
    if cell.setting.suite == "quick" and not cell.is_first:
        return
    for name, (op, args) in raw.calls.items():
        if _gives_nan(op, args):
            yield cell.skip("torch", f"opcheck {name}: it takes NaN and NaN for different")
            continue
        try:
            torch.library.opcheck(op, args)
            comparison = PASSED
        except Exception as error:
            comparison = Comparison(False, message=f"{type(error).__name__}: {error}")
        yield cell.record("torch", f"opcheck {name}", (), "exact", comparison)


def _gives_nan(op: Any, args: tuple[Any, ...]) -> bool:
    result = op(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))
    results = result if isinstance(result, tuple) else (result,)
    return any(isinstance(value, torch.Tensor) and bool(value.isnan().any()) for value in results)


def _fake(cell: Cell) -> Iterator[Record]:
    real = cell.run(leaves=[]).outputs
    with FakeTensorMode() as mode:
        inputs = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in cell.inputs.items()
        }
        call = cell.candidate.call
        fake = guarded("forward", lambda: named(call(cell.case.function, inputs), cell.spec.output))
    layouts, expected = ({name: _layout(value) for name, value in results.items()} for results in (fake, real))
    message = "" if layouts == expected else f"expected {expected}, got {layouts}"
    yield cell.record("torch", "fake tensors", (), "exact", Comparison(not message, message=message))


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _compiled(cell: Cell) -> Iterator[Record]:
    torch.compiler.reset()
    function = cell.candidate.operator.function(cell.case.function)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    own = own_parameters(function)

    def call(inputs: Inputs) -> Any:
        return compiled(**grouped(own, cell.spec.groups, {"backend": cell.candidate.backend, **inputs}))

    refused = cell.spec.eager_only & cell.inputs.keys()
    if refused:
        yield cell.record("torch", "compile refuses", (), "exact", _refused(cell, call, sorted(refused)))
        return
    eager = cell.run()
    upstream = cell.upstream(eager)
    expected = eager.results(upstream)
    results = Run(call, cell.spec.output, cell.inputs, cell.allowed_leaves).results(upstream)
    yield from _compare_bits(cell, "compiled", results, expected)


def _refused(cell: Cell, call: Callable[[Inputs], Any], options: list[str]) -> Comparison:
    try:
        Run(call, cell.spec.output, cell.inputs, cell.allowed_leaves)
    except Misbehaved as error:
        if re.search("|".join(options), str(error)):
            return PASSED
        return Comparison(False, message=f"expected an error that names {' or '.join(options)}, got {error}")
    return Comparison(False, message=f"expected an error that names {' or '.join(options)}, nothing was raised")


def _compare_bits(cell: Cell, label: str, results: Results, expected: Results) -> Iterator[Check]:
    if results.keys() != expected.keys():
        yield cell.failed("torch", label, f"expected {', '.join(expected)}, got {', '.join(results)}")
        return
    for item, value in expected.items():
        yield cell.record(
            "torch", f"{item}, {label}", tuple(value.shape), "bitwise", compare.bits(results[item], value)
        )


def _no_sync(cell: Cell) -> Iterator[Record]:
    """Check that forward and backward do not wait for the device; validation of values, which must wait, is off."""
    inputs = _unvalidated_inputs(cell)
    reason = cell.spec.waits(inputs, cell.candidate.backend)
    if reason is not None:
        yield cell.skip("torch", f"no host sync: {reason}")
        return
    run = cell.run(inputs)
    upstream = cell.upstream(run)
    run.results(upstream)
    torch.cuda.synchronize(cell.setting.device)
    try:
        with syncs_raise():
            _call_unvalidated(cell, inputs, upstream)
        comparison = PASSED
    except Misbehaved as error:
        comparison = Comparison(False, message=str(error), traceback=error.traceback)
    yield cell.record("torch", "no host sync", (), "exact", comparison)


@contextmanager
def syncs_raise() -> Iterator[None]:
    """Let PyTorch raise where it waits for a GPU.

    To set this mode warns, after it is set: as an error, the warning would leave it set for whatever comes next.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _graph(cell: Cell) -> Iterator[Record]:
    """Capture a call on some values and replay it on others: the same bits as an eager call on those."""
    host_arguments = [name for name in cell.spec.on_host & cell.inputs.keys() if not _on_gpu(cell.inputs[name])]
    if host_arguments:
        yield cell.skip("torch", f"CUDA graph: {', '.join(host_arguments)} on the host")
        return
    reason = cell.spec.waits(cell.inputs, "native") if cell.candidate.backend == "native" else None
    if reason:
        yield cell.skip("torch", f"CUDA graph: {reason}")
        return
    fresh = cell.redrawn()
    eager = fresh.run(_unvalidated_inputs(fresh))
    upstream = fresh.upstream(eager)
    expected = eager.results(upstream)

    static = copy.deepcopy(_unvalidated_inputs(cell))
    lifted = {name: torch.ones_like(value) for name, value in upstream.items()}
    side = torch.cuda.Stream(cell.setting.device)
    side.wait_stream(torch.cuda.current_stream(cell.setting.device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            _call_unvalidated(cell, static, lifted)
    torch.cuda.synchronize(cell.setting.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The copies that Run makes of its inputs are captured too, and read ``static``.
        results = _call_unvalidated(cell, static, lifted)
    for name, value in fresh.inputs.items():
        if isinstance(value, torch.Tensor):
            static[name].copy_(value)
    for name, value in upstream.items():
        lifted[name].copy_(value)
    graph.replay()
    torch.cuda.synchronize(cell.setting.device)
    yield from _compare_bits(cell, "CUDA graph", results, expected)


def _call_unvalidated(cell: Cell, inputs: Inputs, upstream: Results) -> Results:
    """Call the backend without reading values on the host, which would wait for the device and cannot be captured."""
    call = cell.candidate.call
    run = Run(lambda arguments: call(cell.case.function, arguments), cell.spec.output, inputs, cell.allowed_leaves)
    return run.results(upstream, looks=False)


def _unvalidated_inputs(cell: Cell) -> Inputs:
    """Return the arguments of a call that does not validate values."""
    function = cell.candidate.operator.function(cell.case.function)
    takes_it = "validate" in inspect.signature(function).parameters
    return {**cell.inputs, "validate": False} if takes_it else cell.inputs


def _on_gpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda
