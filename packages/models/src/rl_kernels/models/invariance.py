"""``invariant(model)``: make a model whose rows do not depend on the batch, and give it back as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import nn

from rl_kernels.core.dispatch import choose
from rl_kernels.det_gemm import canary
from rl_kernels.det_gemm.op import OPERATOR, describe
from rl_kernels.models import pretrained
from rl_kernels.models.audits import audit
from rl_kernels.models.fused.swaps import rotary_module, rotary_swap
from rl_kernels.models.layers import has_weights, original_of, replacement
from rl_kernels.models.swap import class_swap, forget_graphs, held, hold

CLASS, ATTENTION, ROTARY = "class", "attention", "rotary"
AUDITED_PROMPTS, AUDITED_TOKENS = 3, 14
"""What ``strict`` runs through a model with modules that nothing is known of."""
SHOWN = 3
"""Modules left alone that a warning names."""


class Invariance:
    """What ``invariant`` did to a model, until ``undo`` or the end of a ``with`` block.

    Attributes:
        swapped: name of each module that was swapped -> the class that it had.
        left: name of each module that may follow the batch and was left alone -> why.
    """

    def __init__(self, swapped: Mapping[str, str], left: Mapping[str, str], releases: list[Callable[[], None]]) -> None:
        self.swapped, self.left = MappingProxyType(dict(swapped)), MappingProxyType(dict(left))
        self._releases = releases

    def undo(self) -> None:
        """Give the model back as it was; a second call does nothing.

        A module that another ``invariant`` holds too stays swapped until that one is undone.
        """
        if self._releases:
            forget_graphs()
        while self._releases:
            self._releases.pop()()

    def __enter__(self) -> Invariance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def invariant(model: nn.Module, *, strict: bool = False) -> Invariance:
    """Make each row of a model's output a function of that row alone, bit for bit, until it is undone.

    ``with invariant(model): ...`` for a while, or ``handle = invariant(model)`` and ``handle.undo()`` when it pleases.

    Modules are changed where they are: each gets a subclass of its class that differs in ``forward`` alone. So the same
    objects keep their parameters (tied ones too), ``state_dict``, hooks, training flag and place in an optimizer.

    - ``nn.Linear`` becomes a ``DetLinear``.
    - LayerNorm and RMSNorm, those of transformers too, become row-wise norms. A norm of transformers is recognised by
      what it computes for a random row.
    - The weight of an ``nn.Embedding`` gets a gradient that is the same in every run, on a GPU with Triton.
    - SiLU, GELU and sigmoid modules on a CPU, where PyTorch rounds the last elements of a tensor in another way.
    - A model of transformers gets ``det_attention``, as an implementation called ``rl_kernels_flash``: padding,
      packing, batch, KV cache, chunks and continuous batching change no bit. Give it ``position_ids`` where it is
      padded on the left, as ``generate`` does. Dropout in it raises.

    Everything else stays; ``audit`` tells whether it follows the batch.

    A deep copy of the model is swapped as it is; ``invariant(copy)`` takes it over and can undo it. A pickle holds the
    classes that the modules had. ``fully_shard`` and parametrizations may come before ``undo``.

    Args:
        model: any module; one that is swapped already is held, and stays so until both are undone.
        strict: raise where a module that may follow the batch is left alone, instead of warning. Modules that compute
            with weights of their own, such as the experts of a mixture, are tried: a model of transformers runs a
            small ``audit``; another raises, and ``audit(model, inputs)`` tells.

    Returns:
        a handle that tells what was swapped and what was left, undoes it, and is a context manager.

    Raises:
        TypeError: ``model`` is no ``nn.Module``.
        BackendUnavailable: its products cannot run on the GPU that it is on.
        CanaryMismatch: that GPU gives other bits than were recorded for its architecture.
        ValueError: with ``strict``, something was left alone, or follows the batch. The model is as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    classes, left, unsure = _classes(model)
    configs, kept = _configs(model)
    left |= kept
    if left:
        message = _told(left)
        if strict:
            raise ValueError(message)
        warnings.warn(message, UserWarning, stacklevel=2)
    handle = Invariance({name: original_of(module).__name__ for name, (module, _) in classes.items()}, left, [])
    forget_graphs()
    try:
        for module, other in classes.values():
            if isinstance(module, nn.Linear) and module.weight.is_cuda:
                _try_product(module.weight)
            handle._releases.append(hold(module, CLASS, class_swap(other, original_of(module))))
        if configs:
            pretrained.register()
        for config in configs:
            handle._releases.append(hold(config, ATTENTION, pretrained.attention_swap))
        for part in pretrained.pretrained(model):
            file = rotary_module(part)
            if file is not None:
                handle._releases.append(hold(file, ROTARY, rotary_swap))
        if strict and unsure:
            _audited(model, unsure)
    except BaseException:
        handle.undo()
        raise
    return handle


def _try_product(weight: torch.Tensor) -> None:
    """Find out here, and not in the midst of a model that is compiled, whether its products can run and are right."""
    canary.guard(weight, choose(OPERATOR, describe(weight, weight.t())).name)


def _audited(model: nn.Module, unsure: list[str]) -> None:
    """Require that modules which compute with parameters of their own, such as experts, follow no batch."""
    names = ", ".join(unsure[:SHOWN]) + (f" and {len(unsure) - SHOWN} more" if len(unsure) > SHOWN else "")
    if not pretrained.pretrained(model):
        raise ValueError(f"model: {names} may follow the batch: try audit(model, inputs) without strict")
    result = audit(model, prompts=AUDITED_PROMPTS, length=AUDITED_TOKENS)
    if result.culprit is not None:
        raise ValueError(f"model: its output depends on the batch: {result.culprit}")


def _classes(model: nn.Module) -> tuple[dict[str, tuple[nn.Module, type[nn.Module]]], dict[str, str], list[str]]:
    """Return what to swap for what, what is left alone, and what nothing is known of; nothing has changed yet."""
    classes, left, unsure = {}, {}, []
    for name, module in model.named_modules():
        if held(module, CLASS):
            # Held once more, so that it stays as it is until this handle is undone too.
            classes[name] = module, type(module)
            continue
        other, why = replacement(module)
        if other is not None:
            classes[name] = module, other
        elif why:
            left[name] = why
        elif has_weights(module):
            unsure.append(f"{name or 'the model'} ({type(module).__name__})")
    return classes, left, unsure


def _configs(model: nn.Module) -> tuple[list[Any], dict[str, str]]:
    """Return the configs of transformers whose attention is to be ours, and what keeps its own."""
    names = {id(module): name for name, module in model.named_modules()}
    configs: list[Any] = []
    left: dict[str, str] = {}
    for part in pretrained.pretrained(model):
        why = pretrained.why_not(part)
        if why is None:
            configs += pretrained.configs(part)
        else:
            left[f"attention of {names[id(part)] or 'the model'}"] = why
    return configs, left


def _told(left: Mapping[str, str]) -> str:
    told = [f"{name or 'the model'} ({why})" for name, why in left.items()]
    more = f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return f"model: left alone, and may follow the batch: {'; '.join(told[:SHOWN])}{more}"
