"""Call an implementation on copies of the inputs, then use it as a trainer may: backward, again, after a write."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from rl_kernels.core.testing.spec import Inputs
from rl_kernels.lab.check.guard import Misbehaved, Results, check_global_state, equal, guarded, named, result_or_error
from rl_kernels.lab.check.surroundings import Surroundings, global_state

PLAIN = Surroundings()


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
        if around.parameters:
            self.inputs |= {name: torch.nn.Parameter(self.inputs[name]) for name in around.parameters}
        if around.same is not None:
            first, second = around.same
            self.inputs[second] = self.inputs[first]
        self._grads: Results = {}
        self._attached = self._forward()
        self.outputs: Results = {name: value.detach().clone() for name, value in self._attached.items()}

    def _forward(self) -> Results:
        # A copy of the dict: a candidate that edits its keyword arguments must not hide changes to the tensors.
        arguments = dict(self.inputs)
        if self._around.computed:
            arguments |= {name: leaf.clone() for name, leaf in self._leaves.items()}

        def call() -> Results:
            if self._around.checkpointed:
                return named(checkpoint(self._call, arguments, use_reentrant=False), self._output)
            return named(self._call(arguments), self._output)

        return self._guarded_call("forward", call)

    def _guarded_call(self, phase: str, run: Callable[[], Any]) -> Any:
        around = self._around
        if around.forward_only and phase != "forward":
            around = PLAIN
        with around.entered(self._device_type()):
            before = global_state()
            try:
                return guarded(phase, run)
            finally:
                # Also after an error, which may leave global state changed too.
                check_global_state(phase, before)

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
        before = {name: value.clone() for name, value in upstream.items()}
        grads = self._backward(upstream, again=again)
        changed = [name for name, value in upstream.items() if not equal(value, before[name])]
        if changed:
            raise Misbehaved(f"backward wrote into the upstream gradient of {', '.join(changed)}")
        return grads

    def _backward(self, upstream: Mapping[str, torch.Tensor], *, again: bool = False) -> Results:
        outputs = self._outputs_for(upstream)

        def backward() -> Any:
            leaves = list(self._leaves.values())
            return torch.autograd.grad(outputs, leaves, list(upstream.values()), retain_graph=again, allow_unused=True)

        grads = dict(zip(self._leaves, self._guarded_call("backward", backward), strict=True))
        written = [name for name, leaf in self._leaves.items() if leaf.grad is not None]
        if written:
            raise Misbehaved(f"backward wrote .grad of {', '.join(written)}, which autograd does")
        # If there is no gradient, take what was added to main_grad.
        grads |= {name: getattr(self._leaves[name], "main_grad", None) for name, grad in grads.items() if grad is None}
        missing = [name for name, grad in grads.items() if grad is None]
        if missing and upstream.keys() >= self.attached:
            raise Misbehaved(f"no gradient for {', '.join(missing)}")
        # An output need not depend on every argument: x + residual does not depend on the weight of its norm.
        grads |= {name: torch.zeros_like(self._leaves[name]) for name in missing}
        self._grads = {f"gradient:{name}": grad for name, grad in grads.items()}
        return {name: grad.clone() for name, grad in self._grads.items()}

    def spoil(self) -> None:
        """Write into the gradients of the last pass, which are the caller's own."""

        def write() -> None:
            for value in self._grads.values():
                value.fill_(7.0)

        with torch.no_grad():
            guarded("writing into a gradient", write)

    def _outputs_for(self, upstream: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        detached = upstream.keys() - self.attached
        if detached:
            raise Misbehaved(f"{', '.join(sorted(detached))}: detached, expected an output that carries a gradient")
        return [self._attached[name] for name in upstream]

    def results(self, upstream: Mapping[str, torch.Tensor], *, looks: bool = True) -> Results:
        """Return outputs and, given an upstream gradient, gradients; ``looks`` checks values, which waits for a GPU."""
        backward = self.gradients if looks else self._backward
        return {**self.outputs, **(backward(upstream) if upstream and self._leaves else {})}

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
        return self._call_again(upstream)

    def _call_again(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        self._attached = self._forward()
        self.outputs = {name: value.detach().clone() for name, value in self._attached.items()}
        return self.results(upstream)

    def scribbled(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Write into every output and gradient, which are the caller's own, and call again: its results."""

        def write() -> None:
            for value in self.kept.values():
                # An output that is cached or expanded shows up in the next result, or by an error here.
                value.copy_(torch.full_like(value, torch.nan) if value.is_floating_point() else value)

        with torch.no_grad():
            guarded("writing into a result", write)
        return self._call_again(upstream)

    def two_at_once(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Call twice before the backward pass of either: the gradients after both."""
        first = self._attached
        second = self._forward()
        self._attached = first
        self.gradients(upstream)
        self._attached = second
        return self.gradients(upstream)

    def renewed(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Give each leaf with a buffer ``main_grad`` another one, and call again: the gradients."""
        for leaf in self._leaves.values():
            if getattr(leaf, "main_grad", None) is not None:
                leaf.main_grad = torch.zeros_like(leaf.main_grad)  # type: ignore[attr-defined]
        self._attached = self._forward()
        return self.gradients(upstream)

    def written(self, name: str, value: torch.Tensor, upstream: Mapping[str, torch.Tensor]) -> Results | str:
        """Write into an argument before the backward pass: the gradients, or the error that refuses them."""
        with torch.no_grad():
            self.inputs[name].copy_(value)
        return result_or_error(lambda: self.gradients(upstream))

    def second_order(self, upstream: Mapping[str, torch.Tensor]) -> Results | str:
        """Return the gradients of half the squared norm of the gradients, or the error that refuses them."""
        leaves = list(self._leaves.values())

        def twice() -> Any:
            sources = list(upstream.values())
            first = torch.autograd.grad(self._outputs_for(upstream), leaves, sources, create_graph=True)
            total = torch.stack([grad.double().square().sum() for grad in first]).sum() / 2
            return torch.autograd.grad(total, leaves, allow_unused=True)

        result = self._result_or_error("double backward", twice)
        if isinstance(result, str):
            return result
        grads = zip(self._leaves.items(), result, strict=True)
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

        result: Results | str = self._result_or_error("forward mode", tangents)
        return result

    def _result_or_error(self, phase: str, run: Callable[[], Any]) -> Any:
        """Return the result of ``run``, or the message of its error; raise if global state was changed."""
        return self._guarded_call(phase, lambda: result_or_error(lambda: guarded(phase, run)))
