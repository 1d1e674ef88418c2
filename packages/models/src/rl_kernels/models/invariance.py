"""``invariant(model)``: make a model batch-invariant, and undo it."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import nn

from rl_kernels.core.dispatch import choose
from rl_kernels.det_gemm.op import OPERATOR, describe
from rl_kernels.models import hybrids, mixtures, pretrained
from rl_kernels.models.fused.swaps import rotary_module, rotary_swap
from rl_kernels.models.layers import replacement
from rl_kernels.models.marks import Mark, mark, marks_of
from rl_kernels.models.packed import hook_swap
from rl_kernels.models.swap import Undo, class_swap, forget_graphs, held, hold, original_of
from rl_kernels.models.unknown import why_unknown

CLASS, ATTENTION, ROTARY, FREQUENCIES, PACKED = "class", "attention", "rotary", "frequencies", "packed"
DISPATCH = "dispatch"
SHOWN = 3
"""Number of modules left alone that a warning names."""


class Invariance:
    """The changes that ``invariant`` made to a model, until ``undo`` or the end of a ``with`` block.

    Attributes:
        swapped: name of each module that was swapped -> name of the class that it had.
        left: name of each module that was left alone and may depend on the batch -> the reason.
    """

    def __init__(self, strict: bool, *, holds: bool = True, kinds: set[type] | None = None) -> None:
        self._swapped: dict[str, str] = {}
        self._left: dict[str, str] = {}
        self.swapped, self.left = MappingProxyType(self._swapped), MappingProxyType(self._left)
        self._strict, self._holds = strict, holds
        # Classes of the configs whose attention is swapped, for layers that are added later.
        self._config_classes: set[type] = set() if kinds is None else kinds
        self._releases: list[Callable[[], None]] = []
        self._replay: mixtures.Replay | None = None

    @property
    def rerouted(self) -> tuple[int, int]:
        """Tokens that the model would have sent to other experts than the recorded ones, and all tokens replayed.

        A token counts once, whatever the number of layers. Reading it waits for the GPU.
        """
        return (0, 0) if self._replay is None else self._replay.counts()

    def replay(self, routes: Sequence[torch.Tensor] | None) -> None:
        """Set the recorded routes of the sequences of the next passes, as ``routes`` of ``invariant``; None: no routes.

        Raises:
            TypeError, ValueError: ``invariant`` was called without ``routes``, or they do not fit the model.
        """
        if self._replay is None:
            raise ValueError("routes: expected a handle of invariant(model, routes=...)")
        self._replay.set(routes)

    def __reduce__(self) -> Any:
        """Refuse a copy, which would undo the swaps of the original."""
        raise TypeError("Invariance: a handle cannot be copied; invariant(copy of the model) gives one for the copy")

    def undo(self) -> None:
        """Restore the model, and what was added to it; a second call does nothing.

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

    def _swap(self, model: nn.Module, name: str = "") -> None:
        """Swap the modules of a model, or of a module ``name`` that is added to it; warn about modules left alone."""
        modules = {
            f"{name}.{inner}".strip("."): module
            for inner, module in model.named_modules()
            if not any(existing.handle is not None and existing.handle() is self for existing in marks_of(module))
        }
        subclasses, left = _subclasses(modules)
        configs, kept_attention = _configs(modules, self._config_classes)
        left |= kept_attention
        if left:
            message = _left_alone_message(left)
            if self._strict:
                raise ValueError(message)
            warnings.warn(message, UserWarning, stacklevel=3)
        self._left |= left
        self._swapped |= {name: original_of(module).__name__ for name, (module, _) in subclasses.items()}
        forget_graphs()
        for module, subclass in subclasses.values():
            if isinstance(module, nn.Linear) and module.weight.is_cuda:
                _check_product(module.weight)
            self._hold(module, CLASS, class_swap(subclass, original_of(module)))
            if mixtures.is_experts(module) and mixtures.is_cut(module):
                self._hold(mixtures.implementation_of(module), DISPATCH, mixtures.dispatch_swap)
        self._swap_transformers(modules, configs)
        for inner, module in modules.items():
            new_mark = Mark(inner, self._strict, weakref.ref(self) if self._holds else None, self._config_classes)
            self._releases.append(mark(module, new_mark))

    def _swap_transformers(self, modules: Mapping[str, nn.Module], configs: list[Any]) -> None:
        if configs:
            pretrained.register()
        for config in configs:
            self._config_classes.add(type(config))
            self._hold(config, ATTENTION, pretrained.attention_swap)
        for module in modules.values():
            if pretrained.is_rotary(module):
                self._hold(module, FREQUENCIES, pretrained.frequencies_swap)
            if not pretrained.is_pretrained(module):
                continue
            self._hold(module, PACKED, partial(hook_swap, on_new_layer=_on_registration))
            modeling_file = rotary_module(module)
            if modeling_file is not None:
                self._hold(modeling_file, ROTARY, rotary_swap)

    def _hold(self, target: Any, aspect: str, swap: Callable[[Any], Undo]) -> None:
        if self._holds:
            self._releases.append(hold(target, aspect, swap))
        else:
            swap(target)


def _unwrap_peft(parent: nn.Module) -> nn.Module:
    """Return the model inside PEFT's wrapper, which runs encoders of learned prompts itself, or the module itself."""
    inner = parent._modules.get("base_model")
    return inner if inner is not None and type(parent).__module__ == "peft.peft_model" else parent


def _on_registration(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Swap a module that is added to an invariant model, before its first forward pass."""
    # The weights of a parametrized module do not depend on the batch.
    if module is None or name == "parametrizations":
        return
    for existing in marks_of(_unwrap_peft(parent)):
        handle = existing.handle and existing.handle()
        # The handle was freed, or the model is a deep copy: the model stays swapped, so swap the new module too.
        handle = handle or Invariance(existing.strict, holds=existing.handle is not None, kinds=existing.config_classes)
        handle._swap(module, f"{existing.name}.{name}".strip("."))


def invariant(model: nn.Module, *, strict: bool = False, routes: Sequence[torch.Tensor] | None = None) -> Invariance:
    """Make a model batch-invariant until it is undone: each row of its output depends on that row alone, bit for bit.

    Use it as ``with invariant(model): ...``, or as ``handle = invariant(model)`` and later ``handle.undo()``.

    Modules are changed in place: each gets a subclass of its class that differs in ``forward`` alone. So they stay the
    same objects, with their parameters (tied ones too), ``state_dict``, hooks, training flag and place in an optimizer.

    - ``nn.Linear`` becomes a ``DetLinear``, and the ``Conv1D`` of transformers runs on ``det_linear``.
    - LayerNorm and RMSNorm, also of transformers, become row-wise norms. A norm of transformers is recognized by
      its result for random rows.
    - The weight of an ``nn.Embedding`` gets the same gradient in every run, on a GPU with Triton.
    - SiLU, GELU, Mish, ELU, softplus and sigmoid modules are replaced on a CPU, where PyTorch rounds the last elements
      of a tensor differently.
    - Rotary embedding of a transformers model, and MLPs with a SiLU gate, run fused on a GPU with Triton, bit for bit.
      Its frequencies get the bits that the CPU computes, wherever the model was made.
    - Decoder layers of Llama's form decode on a GPU with Triton as a row of launches, bit for bit, while no part of one
      has hooks or another class.
    - Experts of a mixture of transformers run on ``experts``, and its router, recognized by its result for random rows,
      on ``route``: tokens choose the same experts in any batch. Noise in training raises. Experts that transformers
      spread over ranks by its all-to-all stay there, and have the bits of one process.
    - Gated DeltaNet layers of Qwen3-Next and Qwen3.5 run on ``causal_conv1d`` and ``gated_delta_rule``: prefill, pieces
      and decode through transformers' caches give a token the same bits. Continuous batching does not run these models.
    - A model of transformers gets ``det_attention``, as the implementation ``rl_kernels_flash``: padding, packing,
      batch, KV cache, chunks and continuous batching change no bit. With padding on the left, pass ``position_ids``, as
      ``generate`` does. Dropout in attention raises.

    All other modules stay as they are. A module that may depend on the batch is left alone with a warning: one with
    matrices of its own, such as a convolution or quantized experts, a norm over batches, groups or several dims,
    and one whose ``forward`` itself calls a product, a softmax or an attention (on a CPU also an activation). What it
    calls through other functions is not seen: ``audit`` finds that. Nor is dropout elsewhere than in attention.

    Modules that are added later, such as adapters of PEFT or the layers of a larger vocabulary, are treated the same
    when they are assigned, and undone with the model. If another attention is set in a config later, the next forward
    pass warns, or raises with ``strict``.

    A deep copy of the model is swapped too; ``invariant(copy)`` takes it over and can undo it. A pickle holds the
    original classes. ``fully_shard`` and parametrizations may be applied before ``undo``.

    Args:
        model: any module. Calls nest: a module that is swapped already stays swapped until all calls are undone.
        strict: raise, instead of warning, if a module that may depend on the batch is left alone or added later.
        routes: for a mixture whose rollout another engine sampled: the experts that it chose, integers
            ``[T, layers, k]`` for each sequence of the next passes, in their order; layers without experts are left
            out. Tokens go there, and weights are those of the model. -1 stands for a route that was not recorded. The
            handle's ``replay`` sets those of the next batch, and ``rerouted`` counts the tokens that the model would
            have sent elsewhere.

    Returns:
        a handle that lists what was swapped and what was left alone, and undoes it; it is a context manager.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
        BackendUnavailable: no backend runs the model's products on its GPU.
        CanaryMismatch: that GPU computes other bits than recorded for its architecture.
        ValueError: with ``strict``, a module may depend on the batch; or the model cannot replay ``routes``. The model
            is unchanged. In a pass: ``routes`` has another number of tokens.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    _watch_registrations()
    handle = Invariance(strict)
    try:
        handle._swap(model)
        if routes is not None:
            runner = next((module for module in model.modules() if pretrained.is_pretrained(module)), None)
            handle._replay, end = mixtures.replaying(model, runner, routes)
            handle._releases.append(end)
    except BaseException:
        handle.undo()
        raise
    return handle


@functools.cache
def _watch_registrations() -> None:
    torch.nn.modules.module.register_module_module_registration_hook(_on_registration)


def _check_product(weight: torch.Tensor) -> None:
    """Check here, before a model is compiled, that its products can run and have the recorded bits."""
    choose(OPERATOR, describe(weight, weight.t()))


def _subclasses(
    modules: Mapping[str, nn.Module],
) -> tuple[dict[str, tuple[nn.Module, type[nn.Module]]], dict[str, str]]:
    """Return the classes to swap and the modules left alone; changes nothing."""
    subclasses, left = {}, {}
    for name, module in modules.items():
        if held(module, CLASS):
            # Held once more, so that it stays swapped until this handle is undone too.
            subclasses[name] = module, type(module)
            continue
        subclass, no_swap_reason = replacement(module)
        if subclass is not None:
            subclasses[name] = module, subclass
        elif reason := no_swap_reason or why_unknown(module):
            left[name] = reason
    for name in list(left):
        parent, _, child = name.rpartition(".")
        if hybrids.is_part_of_delta_net(child, subclasses.get(parent, (None,))[0]):
            del left[name]
    for name in [name for name, (module, _) in subclasses.items() if mixtures.is_router(module)]:
        block = name.rpartition(".")[0]
        if any(other.rpartition(".")[0] == block and mixtures.is_experts(modules[other]) for other in left):
            # Experts of transformers count by int64 ids, which its own router returns.
            del subclasses[name]
            left[name] = f"its experts are left alone, and a {type(modules[name]).__name__} chooses for them"
    return subclasses, left


def _configs(modules: Mapping[str, nn.Module], config_classes: set[type]) -> tuple[list[Any], dict[str, str]]:
    """Return the configs of transformers whose attention is to be swapped, and the models that keep their attention.

    Args:
        modules: modules of a model, or added to it, by name.
        config_classes: classes of the configs that are swapped in the model.
    """
    configs: list[Any] = []
    left: dict[str, str] = {}
    for name, module in modules.items():
        if not pretrained.is_pretrained(module):
            continue
        reason = pretrained.why_not(module)
        if reason is None:
            configs += pretrained.configs(module)
        else:
            left[f"attention of {name or 'the model'}"] = reason
    visited, config_classes = {id(config) for config in configs}, config_classes | {type(config) for config in configs}
    for module in modules.values():
        config = pretrained.kept_config(module)
        if type(config) in config_classes and id(config) not in visited and not pretrained.is_pretrained(module):
            visited.add(id(config))
            configs.append(config)
    return configs, left


def _left_alone_message(left: Mapping[str, str]) -> str:
    entries = [f"{name or 'the model'} ({reason})" for name, reason in left.items()]
    more = f"; and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
    return f"model: left alone, and may depend on the batch: {'; '.join(entries[:SHOWN])}{more}"
