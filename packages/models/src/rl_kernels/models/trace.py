"""Watch the inputs and outputs of every module of a model, in execution order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from rl_kernels.models.swap import original_of

ROUTER = re.compile(r"router|gate$", re.IGNORECASE)
IDS = (torch.int64, torch.int32)


class Place(NamedTuple):
    """The place of a tensor in a forward pass."""

    module: str
    """Dotted name; empty for the model itself."""
    call: int
    """Index of the module's call in this forward pass, from 0."""
    kind: str
    """``input`` or ``output``."""
    path: str
    """Path of the tensor in the inputs or outputs: ``[0]``, ``hidden_states``, ``logits``."""


class TracedTensor(NamedTuple):
    """A tensor, its place, and the name of the module whose forward computed it."""

    place: Place
    maker: str
    value: torch.Tensor


@contextmanager
def watched(model: nn.Module, callback: Callable[[TracedTensor], None]) -> Iterator[None]:
    """Call ``callback`` with each floating-point input and output of every module during one forward pass.

    The ids of a router, the experts that it chose, count as outputs too.
    """
    calls: Counter[str] = Counter()
    running: list[tuple[str, int]] = [("", 0)]

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            maker, call = running[-1][0], calls[name]
            calls[name] += 1
            for path, value in [*_tensors(args, ""), *_tensors(kwargs, "")]:
                callback(TracedTensor(Place(name, call, "input", path), maker, value))
            running.append((name, call))

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            _, call = running.pop()
            for path, value in _tensors(output, "", with_ids=chooses_experts(module)):
                callback(TracedTensor(Place(name, call, "output", path), name, value))

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            for handle in (
                module.register_forward_pre_hook(before(name), with_kwargs=True),
                module.register_forward_hook(after(name)),
            ):
                stack.callback(handle.remove)
        yield


def chooses_experts(module: nn.Module) -> bool:
    """Say whether a module is the router of a mixture, swapped or not, by the name of its class."""
    return ROUTER.search(original_of(module).__name__) is not None


@contextmanager
def chosen_experts(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect the experts of each forward pass: ``[B T, layers k]``, sorted within a layer; nothing without routers."""
    passes: list[torch.Tensor] = []
    layers: list[torch.Tensor] = []

    def after_router(module: nn.Module, args: Any, output: Any) -> None:
        ids = [value for _, value in _tensors(output, "", with_ids=True) if value.dtype in IDS]
        layers.extend(value.reshape(-1, value.shape[-1]).sort(-1).values for value in ids)

    def after_pass(*_: Any) -> None:
        if layers:
            passes.append(torch.cat(layers, -1))
            layers.clear()

    with ExitStack() as stack:
        for module in model.modules():
            if chooses_experts(module):
                stack.callback(module.register_forward_hook(after_router).remove)
        stack.callback(model.register_forward_hook(after_pass).remove)
        yield passes


def _tensors(value: Any, path: str, *, with_ids: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or (with_ids and value.dtype in IDS):
            yield path, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _tensors(part, f"{path}.{name}".lstrip("."), with_ids=with_ids)
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from _tensors(part, f"{path}[{index}]", with_ids=with_ids)
