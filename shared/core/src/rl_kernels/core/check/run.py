"""Call an implementation on copies of the inputs, and turn whatever it does into named results or a clear failure."""

from __future__ import annotations

import copy
import traceback
from collections import namedtuple
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from rl_kernels.core.dispatch import BackendUnavailable
from rl_kernels.core.testing.spec import Inputs
from rl_kernels.core.testing.surroundings import Surroundings, changed, global_state

Results = dict[str, torch.Tensor]
PLAIN = Surroundings()


class Misbehaved(Exception):
    """A candidate did not answer as an operator must; the message says how."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback
        """Of the exception that the candidate raised, if it did."""


class Ran(Protocol):
    """One call of a candidate, here or in a process of its own."""

    @property
    def inputs(self) -> Inputs:
        """The arguments as they are after the call."""

    @property
    def outputs(self) -> Results:
        """As the call gave them."""

    @property
    def attached(self) -> Collection[str]:
        """Names of the outputs that carry a gradient."""

    @property
    def kept(self) -> Results:
        """Outputs and gradients as they are now, which a later call must not have changed."""

    def gradients(self, upstream: Mapping[str, torch.Tensor], *, again: bool = False) -> Results:
        """Return ``gradient:NAME`` for each differentiable input; ``again`` keeps the graph for a further pass."""

    def results(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Return outputs and, if there is an upstream gradient, gradients."""

    def updated(self, inputs: Inputs, upstream: Mapping[str, torch.Tensor], *, silently: bool) -> Results:
        """Write other values into the same tensors and call again: its results.

        ``silently`` writes them without a new version of the tensors, as a kernel of another library would.
        """

    def scribbled(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Write into every output and gradient, which are the caller's own, and call again: its results."""

    def two_at_once(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Call twice before the backward pass of either: the gradients after both."""

    def second_order(self, upstream: Mapping[str, torch.Tensor]) -> Results | str:
        """Return the gradients of half the squared norm of the gradients, or the error that refuses them."""

    def forward_mode(self) -> Results | str:
        """Return the outputs' tangents for tangents of ones, or the error that refuses them."""


class Run:
    """One call in this process. ``leaves`` names the arguments that require grad; ``output`` a single result."""

    def __init__(
        self,
        call: Callable[[Inputs], Any],
        output: str,
        inputs: Inputs,
        leaves: Collection[str] = (),
        around: Surroundings = PLAIN,
    ) -> None:
        # deepcopy keeps strides and offsets, and shares no storage.
        self.inputs = copy.deepcopy(inputs)
        self._call, self._output, self._around = call, output, around
        self._leaves = {
            name: value.requires_grad_() for name in leaves if isinstance(value := self.inputs.get(name), torch.Tensor)
        }
        self._grads: Results = {}
        self._attached = self._forward()
        self.outputs: Results = {name: value.detach().clone() for name, value in self._attached.items()}

    def _forward(self) -> Results:
        # A dict of its own: a candidate that edits its keyword arguments must not hide what it did to the tensors.
        return self._watched("forward", lambda: named(self._call(dict(self.inputs)), self._output))

    def _watched(self, phase: str, run: Callable[[], Any]) -> Any:
        around = self._around
        if around.forward_only and phase != "forward":
            around = PLAIN
        with around.entered(self._device_type()):
            before = global_state()
            result = guarded(phase, run)
            as_found(phase, before)
        return result

    def _device_type(self) -> str:
        devices = (value.device.type for value in self.inputs.values() if isinstance(value, torch.Tensor))
        return next(devices, "cpu")

    @property
    def kept(self) -> Results:
        """Outputs and gradients as they are now, which a later call must not have changed."""
        return {**{name: value.detach() for name, value in self._attached.items()}, **self._grads}

    @property
    def attached(self) -> set[str]:
        """Names of the outputs that carry a gradient."""
        return {name for name, value in self._attached.items() if value.requires_grad}

    def gradients(self, upstream: Mapping[str, torch.Tensor], *, again: bool = False) -> Results:
        """Return ``gradient:NAME`` for each differentiable input; ``again`` keeps the graph for a further pass."""
        outputs = self._outputs_for(upstream)

        def backward() -> Any:
            leaves = list(self._leaves.values())
            return torch.autograd.grad(outputs, leaves, list(upstream.values()), retain_graph=again, allow_unused=True)

        grads = dict(zip(self._leaves, self._watched("backward", backward), strict=True))
        # What was added to a buffer is what there is of a gradient.
        grads |= {name: getattr(self._leaves[name], "main_grad", None) for name, grad in grads.items() if grad is None}
        missing = [name for name, grad in grads.items() if grad is None]
        if missing:
            raise Misbehaved(f"no gradient for {', '.join(missing)}")
        self._grads = {f"gradient:{name}": grad for name, grad in grads.items()}
        return {name: grad.clone() for name, grad in self._grads.items()}

    def _outputs_for(self, upstream: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        detached = upstream.keys() - self.attached
        if detached:
            raise Misbehaved(f"{', '.join(sorted(detached))}: detached, expected an output that carries a gradient")
        return [self._attached[name] for name in upstream]

    def results(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Return outputs and, if there is an upstream gradient, gradients."""
        return {**self.outputs, **(self.gradients(upstream) if upstream and self._leaves else {})}

    def updated(self, inputs: Inputs, upstream: Mapping[str, torch.Tensor], *, silently: bool) -> Results:
        """Write other values into the same tensors and call again: its results."""
        with torch.no_grad():
            for name, value in inputs.items():
                mine = self.inputs.get(name)
                if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor):
                    (mine.data if silently else mine).copy_(value)
                elif not isinstance(value, torch.Tensor):
                    self.inputs[name] = value
        for name, value in self._attached.items():
            if not equal(value.detach(), self.outputs[name]):
                raise Misbehaved(f"{name} changed with the inputs: it shares their storage")
        return self._anew(upstream)

    def _anew(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        self._attached = self._forward()
        self.outputs = {name: value.detach().clone() for name, value in self._attached.items()}
        return self.results(upstream)

    def scribbled(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Write into every output and gradient, which are the caller's own, and call again: its results."""

        def write() -> None:
            for value in self.kept.values():
                # A scalar that is NaN and one that is expanded show alike: by the next result, or by an error.
                value.copy_(torch.full_like(value, torch.nan) if value.is_floating_point() else value)

        with torch.no_grad():
            guarded("writing into a result", write)
        return self._anew(upstream)

    def two_at_once(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Call twice before the backward pass of either: the gradients after both."""
        first = self._attached
        second = self._forward()
        self._attached = first
        self.gradients(upstream)
        self._attached = second
        return self.gradients(upstream)

    def second_order(self, upstream: Mapping[str, torch.Tensor]) -> Results | str:
        """Return the gradients of half the squared norm of the gradients, or the error that refuses them."""
        leaves = list(self._leaves.values())

        def twice() -> Any:
            sources = list(upstream.values())
            first = torch.autograd.grad(self._outputs_for(upstream), leaves, sources, create_graph=True)
            total = torch.stack([grad.double().square().sum() for grad in first]).sum() / 2
            return torch.autograd.grad(total, leaves, allow_unused=True)

        found = _or_refused(lambda: self._watched("double backward", twice))
        if isinstance(found, str):
            return found
        grads = zip(self._leaves.items(), found, strict=True)
        return {name: torch.zeros_like(leaf) if grad is None else grad.clone() for (name, leaf), grad in grads}

    def forward_mode(self) -> Results | str:
        """Return the outputs' tangents for tangents of ones, or the error that refuses them."""

        def tangents() -> Results:
            with forward_ad.dual_level():
                duals = {
                    name: forward_ad.make_dual(leaf.detach(), torch.ones_like(leaf))
                    for name, leaf in self._leaves.items()
                }
                results = named(self._call({**self.inputs, **duals}), self._output)
                pairs = {name: forward_ad.unpack_dual(value) for name, value in results.items()}
                return {
                    name: torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent.clone()
                    for name, pair in pairs.items()
                }

        return _or_refused(lambda: self._watched("forward mode", tangents))


def equal(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Say whether a result is there with the numbers that are expected, any NaN being as good as another."""
    return found is not None and torch.equal(found.nan_to_num(), expected.nan_to_num())


def as_found(phase: str, before: dict[str, Any]) -> None:
    """Raise if something of the global state is no longer as it was."""
    names = changed(before)
    if names:
        raise Misbehaved(f"{phase} did not leave as it found: {', '.join(names)}")


def _or_refused(run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns, or what it says where it refuses."""
    try:
        return run()
    except Misbehaved as error:
        return str(error)


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

    But ``BackendUnavailable``, because a backend that says beforehand that a call is beyond it has not misbehaved; and
    Ctrl-C, which is for us. A candidate that raises either has a process of its own (``worker.py``).
    """
    try:
        return run()
    except (Misbehaved, BackendUnavailable, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise misbehaved(phase, error) from error


def misbehaved(phase: str, error: BaseException) -> Misbehaved:
    """Say what was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return Misbehaved(
        f"{phase} raised {type(error).__name__}: {error}{where}", "".join(traceback.format_exception(error))
    )
