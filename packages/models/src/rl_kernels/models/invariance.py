"""``invariant(model)``: make a model batch-invariant, and undo it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import nn

from rl_kernels.core.dispatch import choose
from rl_kernels.det_gemm.op import OPERATOR, describe
from rl_kernels.models import pretrained
from rl_kernels.models.audits import audit
from rl_kernels.models.fused.swaps import rotary_module, rotary_swap
from rl_kernels.models.layers import replacement
from rl_kernels.models.packed import hook_swap
from rl_kernels.models.swap import class_swap, forget_graphs, held, hold, original_of
from rl_kernels.models.unknown import call_in_forward, has_matrices

CLASS, ATTENTION, ROTARY, PACKED = "class", "attention", "rotary", "packed"
AUDITED_PROMPTS, AUDITED_TOKENS = 3, 14
"""Size of the audit that ``strict`` runs on a model with unknown modules."""
SHOWN = 3
"""Number of modules left alone that a warning names."""


class Invariance:
    """The changes that ``invariant`` made to a model, until ``undo`` or the end of a ``with`` block.

    Attributes:
        swapped: name of each module that was swapped -> name of the class that it had.
        left: name of each module that was left alone and may depend on the batch -> the reason.
    """

    def __init__(self, swapped: Mapping[str, str], left: Mapping[str, str], releases: list[Callable[[], None]]) -> None:
        self.swapped, self.left = MappingProxyType(dict(swapped)), MappingProxyType(dict(left))
        self._releases = releases

    def __reduce__(self) -> Any:
        """Refuse a copy, which would undo the swaps of the original."""
        raise TypeError("Invariance: a handle cannot be copied; invariant(copy of the model) gives one for the copy")

    def undo(self) -> None:
        """Restore the model; a second call does nothing.

        A module that another ``invariant`` also holds stays swapped until that one is undone.
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
    """Make a model batch-invariant until it is undone: each row of its output depends on that row alone, bit for bit.

    Use it as ``with invariant(model): ...``, or as ``handle = invariant(model)`` and later ``handle.undo()``.

    Modules are changed in place: each gets a subclass of its class that differs in ``forward`` alone. So they stay the
    same objects, with their parameters (tied ones too), ``state_dict``, hooks, training flag and place in an optimizer.

    - ``nn.Linear`` becomes a ``DetLinear``, and the ``Conv1D`` of transformers runs on ``det_linear``.
    - LayerNorm and RMSNorm, those of transformers too, become row-wise norms. A norm of transformers is recognised by
      its result for random rows.
    - The weight of an ``nn.Embedding`` gets the same gradient in every run, on a GPU with Triton.
    - SiLU, GELU and sigmoid modules are replaced on a CPU, where PyTorch rounds the last elements of a tensor
      differently.
    - Rotary embedding of a transformers model, and MLPs with a SiLU gate, run fused on a GPU with Triton, bit for bit.
    - A model of transformers gets ``det_attention``, as the implementation ``rl_kernels_flash``: padding, packing,
      batch, KV cache, chunks and continuous batching change no bit. With padding on the left, pass ``position_ids``, as
      ``generate`` does. Dropout in attention raises.

    All other modules stay as they are; ``audit`` tells whether their output depends on the batch. A user's module is
    left alone with a warning if its ``forward`` itself calls a product, a softmax or an attention (on a CPU also an
    activation); what it calls through other functions is not seen.

    A deep copy of the model is swapped too; ``invariant(copy)`` takes it over and can undo it. A pickle holds the
    original classes. ``fully_shard`` and parametrizations may be applied before ``undo``.

    Args:
        model: any module. Calls nest: a module that is swapped already stays swapped until all calls are undone.
        strict: raise, instead of warning, if a module that may depend on the batch is left alone. Unknown modules raise
            too: those with matrices of their own, such as the experts of a mixture. A model of transformers is tested
            by a small ``audit`` instead; for any other, drop ``strict``, run ``audit(model, inputs)``, and compare
            rollout and training, which ``audit`` does not.

    Returns:
        a handle that lists what was swapped and what was left alone, and undoes it; it is a context manager.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
        BackendUnavailable: no backend runs the model's products on its GPU.
        CanaryMismatch: that GPU gives other bits than those recorded for its architecture.
        ValueError: with ``strict``, a module was left alone or depends on the batch. The model is unchanged.
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
            if pretrained.why_not(part) is None:
                handle._releases.append(hold(part, PACKED, hook_swap))
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
    """Check here, before a model is compiled, that its products can run and have the recorded bits."""
    choose(OPERATOR, describe(weight, weight.t()))


def _audited(model: nn.Module, unsure: list[str]) -> None:
    """Require that modules with weights of their own, such as experts, do not depend on the batch."""
    names = ", ".join(unsure[:SHOWN]) + (f" and {len(unsure) - SHOWN} more" if len(unsure) > SHOWN else "")
    if not pretrained.pretrained(model):
        raise ValueError(f"model: {names} may depend on the batch: drop strict and run audit(model, inputs)")
    result = audit(model, prompts=AUDITED_PROMPTS, length=AUDITED_TOKENS)
    if result.culprit is not None:
        raise ValueError(f"model: its output depends on the batch: {result.culprit}")


def _classes(model: nn.Module) -> tuple[dict[str, tuple[nn.Module, type[nn.Module]]], dict[str, str], list[str]]:
    """Return the classes to swap, the modules left alone, and the unknown modules; changes nothing."""
    classes, left, unsure = {}, {}, []
    for name, module in model.named_modules():
        if held(module, CLASS):
            # Held once more, so that it stays swapped until this handle is undone too.
            classes[name] = module, type(module)
            continue
        other, why = replacement(module)
        if other is not None:
            classes[name] = module, other
        elif why:
            left[name] = why
        elif has_matrices(module):
            unsure.append(f"{name or 'the model'} ({type(module).__name__})")
        elif (called := call_in_forward(module)) is not None:
            if pretrained.pretrained(model):
                unsure.append(f"{name or 'the model'} ({type(module).__name__})")
            else:
                left[name] = f"its forward calls {called}; use det_attention, nn.Linear and modules for activations"
    return classes, left, unsure


def _configs(model: nn.Module) -> tuple[list[Any], dict[str, str]]:
    """Return the configs of transformers whose attention is to be swapped, and the models that keep theirs."""
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
    return f"model: left alone, and may depend on the batch: {'; '.join(told[:SHOWN])}{more}"
