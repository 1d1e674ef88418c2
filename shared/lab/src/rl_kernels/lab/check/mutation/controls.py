"""Negative controls: a correct implementation with an error added from outside, of kinds that any operator can have.

A control takes the correct call and returns a wrong one, or None if it does not apply to the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from rl_kernels.core.testing import INTEGERS, Inputs, Spec, bits_of

Call = Callable[[str, Inputs], Any]
Control = Callable[[Call, Spec], Call | None]
Edit = Callable[[torch.Tensor], Any]

OFF = 0.01
"""Error of one element: this much, plus this share of the largest element."""


def _outputs(edit: Edit) -> Control:
    """Edit every output."""

    def control(call: Call, spec: Spec) -> Call:
        return lambda function, inputs: _map_tensors(call(function, inputs), edit)

    return control


def _gradients(edit: Edit) -> Control:
    """Edit the gradient of every differentiable argument."""

    def control(call: Call, spec: Spec) -> Call:
        def wrong_call(function: str, inputs: Inputs) -> Any:
            passed = {
                name: _Edited.apply(value, edit)
                for name in spec.differentiable
                if isinstance(value := inputs.get(name), torch.Tensor) and value.requires_grad
            }
            return call(function, {**inputs, **passed})

        return wrong_call

    return _if_differentiable(control)


def _upstreams(edit: Edit) -> Control:
    """Edit the upstream gradient of every output."""
    return _if_differentiable(_outputs(lambda value: _Edited.apply(value, edit)))


def _if_differentiable(control: Control) -> Control:
    return lambda call, spec: control(call, spec) if spec.differentiable else None


class _Edited(torch.autograd.Function):
    """The identity, with an edited gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, edit: Edit) -> torch.Tensor:
        ctx.edit = edit
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, None]:
        return ctx.edit(upstream), None


def _result(answer: Callable[[Any], Any]) -> Control:
    """Replace the whole result."""
    return lambda call, spec: lambda function, inputs: answer(call(function, inputs))


def _map_tensors(result: Any, edit: Edit) -> Any:
    if isinstance(result, torch.Tensor):
        return edit(result)
    return result._replace(**{name: edit(value) for name, value in result._asdict().items()})


def _raise(value: object) -> Any:
    raise RuntimeError("planted")


def _one_off(value: torch.Tensor) -> torch.Tensor:
    if not value.numel():
        return value
    error = torch.zeros_like(value).flatten()
    error[-1] = OFF * (1 + value.detach().abs().amax())
    return value + error.view(value.shape)


def _one_nan(value: torch.Tensor) -> torch.Tensor:
    return value + torch.where(torch.arange(value.numel(), device=value.device).view(value.shape) == 0, torch.nan, 0.0)


def _narrowed(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16 if value.dtype == torch.float16 else torch.float16)


def _moved(value: torch.Tensor, steps: int) -> torch.Tensor:
    """Move every element up by some units in the last place."""
    integers = bits_of(value) + steps
    other = integers.to(INTEGERS[value.element_size()]).view(value.dtype)
    return value + (other - value).detach()


def _random_last_bit(value: torch.Tensor) -> torch.Tensor:
    return _moved(value, int(torch.randint(2, ())))


def _size_in_last_bit(call: Call, spec: Spec) -> Call:
    def wrong_call(function: str, inputs: Inputs) -> Any:
        size = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
        # Use the bit length, because the size may be a multiple of 3 for every number of rows.
        return _map_tensors(call(function, inputs), lambda value: _moved(value, size.bit_length() % 3))

    return wrong_call


def _stale(call: Call, spec: Spec) -> Call:
    cached: dict[object, Any] = {}

    def wrong_call(function: str, inputs: Inputs) -> Any:
        shapes = {name: value.shape for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        key = function, tuple(shapes.items())
        if key not in cached:
            cached[key] = call(function, inputs)
        return cached[key]

    return wrong_call


def _reused_buffer(call: Call, spec: Spec) -> Call:
    buffers: dict[object, torch.Tensor] = {}

    def wrong_call(function: str, inputs: Inputs) -> Any:
        place = count()

        def moved(value: torch.Tensor) -> torch.Tensor:
            buffer = buffers.setdefault((next(place), value.shape), torch.empty_like(value))
            result = value.clone()
            result.data = buffer.copy_(value.detach())
            return result

        return _map_tensors(call(function, inputs), moved)

    return wrong_call


def _shifted_ids(call: Call, spec: Spec) -> Call | None:
    def wrong_call(function: str, inputs: Inputs) -> Any:
        return call(function, {**inputs, **{name: inputs[name].roll(1, -1) for name in spec.ids if name in inputs}})

    return wrong_call if spec.ids else None


def _shifted_mask(call: Call, spec: Spec) -> Call | None:
    def wrong_call(function: str, inputs: Inputs) -> Any:
        changed = {name: inputs[name].roll(1, -1) for name in spec.masks if name in inputs}
        ignored = inputs.get("ignore_index")
        for name in spec.ids if ignored is not None else ():
            hidden = inputs[name] == ignored
            shown = inputs[name].masked_fill(hidden, 0)
            changed[name] = shown.masked_fill(hidden.roll(1, -1), ignored)
        return call(function, {**inputs, **changed})

    return wrong_call if spec.masks or spec.ids else None


def _overwrites(call: Call, spec: Spec) -> Call:
    def wrong_call(function: str, inputs: Inputs) -> Any:
        result = call(function, inputs)
        for name in inputs.keys() - spec.overwritten(inputs):
            if isinstance(inputs[name], torch.Tensor) and inputs[name].is_floating_point():
                inputs[name].data.add_(1)
        return result

    return wrong_call


def _accepts_anything(call: Call, spec: Spec) -> Call:
    def wrong_call(function: str, inputs: Inputs) -> Any:
        try:
            return call(function, inputs)
        except (TypeError, ValueError):
            return torch.zeros(())

    return wrong_call


CONTROLS: dict[str, dict[str, Control]] = {
    "accuracy": {
        "all zeros": _outputs(lambda value: value * 0),
        "sign flipped": _outputs(torch.neg),
        "one element off": _outputs(_one_off),
        "one element NaN": _outputs(_one_nan),
        "lower precision": _outputs(_narrowed),
        "wrong shape": _outputs(lambda value: value[None]),
        "returns None": _result(lambda result: None),
        "returns a dict": _result(lambda result: {"result": result}),
        "raises": _result(_raise),
        "stale output": _stale,
        "shifted ids": _shifted_ids,
        "mask off by one": _shifted_mask,
    },
    "gradients": {
        "detached": _if_differentiable(_outputs(torch.Tensor.detach)),
        "gradient of zeros": _gradients(torch.zeros_like),
        "gradient sign flipped": _gradients(torch.neg),
        "gradient one element off": _gradients(_one_off),
        "no gradient": _gradients(lambda grad: None),
        "raises in backward": _gradients(_raise),
        "gradient for an upstream of ones only": _upstreams(torch.ones_like),
    },
    "repeatability": {"random last bit": _outputs(_random_last_bit)},
    "invariance": {"last bit depends on the batch size": _size_in_last_bit},
    "robustness": {"accepts anything": _accepts_anything},
    "hygiene": {"overwrites an input": _overwrites, "returns the same buffer again": _reused_buffer},
}
"""Relation that must catch it -> name -> control."""
