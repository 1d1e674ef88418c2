"""``head_logp``: log-probabilities through a model's head, with its bias, LoRA adapter or sharded weight."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rl_kernels.core.outputs import LogpStats
from rl_kernels.det_gemm import det_linear
from rl_kernels.det_gemm.module import DetLinear
from rl_kernels.linear_logp import linear_logits, linear_logp
from rl_kernels.models.swap import HOOK, WITHIN_HOOK, calls_own_forward, original_of, replaced

LORA = ("base_layer", "lora_A", "lora_B", "scaling", "active_adapters", "lora_dropout")
SAVED = ("original_module", "modules_to_save", "active_adapters", "disable_adapters")
"""Attributes that PEFT documents for LoRA layers, and for modules trained as a whole (``modules_to_save``)."""


def head_logp(
    head: nn.Module, hidden: torch.Tensor, target_ids: torch.Tensor, **options: Any
) -> torch.Tensor | LogpStats:
    """Return the log-probability of each target under the logits of a head, without materializing the logits.

    A LoRA adapter joins the sum of each logit as ``[hidden, s hidden A^T] [W, B]^T``, s being its scaling, in the dtype
    of the weight: in BF16 and FP16, ``s hidden A^T`` and B are rounded to it. Gradients flow to A and B. This copies
    the weight, and allocates a gradient of its size. A head wrapped by ``fully_shard`` is called through its own hooks,
    which gather the weight and reduce its gradient. A head that ``parallelize`` cut scores the whole vocabulary.

    Args:
        head: an ``nn.Linear``, a ``DetLinear``, one of these with a LoRA adapter of PEFT, merged or not, or one of
            PEFT's ``modules_to_save``. Its weight ``[V, D]`` may be tied to an embedding.
        hidden: ``[..., D]``, as in ``linear_logp``.
        target_ids: ``[...]``, as in ``linear_logp``.
        options: options of ``linear_logp``, such as ``temperature``, ``softcap``, ``logit_scale``, ``return_stats``,
            and ``memory="fast"``, which keeps logits for backward.

    Returns:
        as ``linear_logp``: FP32 log-probabilities in the shape of target_ids, or ``LogpStats`` with ``return_stats``.

    Raises:
        TypeError: the head is none of these, or computes something else too: another adapter, a quantized weight, hooks
            that see its output; the message names it.
        ValueError: dropout of an adapter is active, or an argument is not as in ``linear_logp``.
    """
    if not isinstance(head, nn.Module):
        raise TypeError(f"head: expected an nn.Module, got {type(head).__name__}")

    module: Any = _active_module(head)

    def forward(hidden: torch.Tensor) -> torch.Tensor | LogpStats:
        if is_cut(module):
            return module.logp(hidden, target_ids, **options)
        rows, weight, bias = _operands(module, hidden)
        return linear_logp(rows, weight, target_ids.to(rows.device), bias, **options)

    for candidate in (head, module):
        if _is_sharded(candidate):
            return _call_with_forward(candidate, lambda hidden: copied(forward(hidden)), hidden)
    _check_hooks(head, *module.modules())
    _check_parts(module)
    # accelerate's hook moves the rows to the weight, and loads a weight that it offloads.
    return _call_with_forward(module, forward, hidden, WITHIN_HOOK) if HOOK in vars(module) else forward(hidden)


@contextmanager
def unrounded(head: nn.Module) -> Iterator[None]:
    """Let a head that ``head_logp`` takes return the logits that it scores, in FP32 (FP64 for FP64), no gradients."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return linear_logits(*_operands(_active_module(head), hidden)).logits

    with replaced(head, WITHIN_HOOK if HOOK in vars(head) else "forward", forward):
        yield


def is_cut(module: nn.Module) -> bool:
    """Say whether ``parallelize`` cut a head; without it, its modules are not imported."""
    layers = sys.modules.get("rl_kernels.models.parallel.layers")
    return layers is not None and isinstance(module, layers.VocabParallelHead)


def _active_module(head: Any) -> nn.Module:
    """Return the module that PEFT calls for a head that it trains as a whole, or the head itself."""
    module: nn.Module = head
    if all(hasattr(head, name) for name in SAVED):
        active = None if head.disable_adapters else next(iter(head.active_adapters), None)
        module = dict(head.modules_to_save.items()).get(active, head.original_module)
    return module


def _check_hooks(*modules: nn.Module) -> None:
    """Refuse hooks and replaced forwards: a call of these modules would run them, ``head_logp`` does not."""
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            raise TypeError("head: expected no forward hooks, on it or inside it: they would not run")
        if not calls_own_forward(module):
            raise TypeError("head: expected the forward of each class, one was replaced on the object")


def _check_parts(module: nn.Module) -> None:
    """Refuse weights that accelerate loads only while a part of the head is called: ``head_logp`` calls no part."""
    for name, part in module.named_modules():
        if part is not module and any(value.is_meta for value in part.parameters(recurse=False)):
            raise TypeError(f"head: accelerate offloads the weight of {name}; give the head a device in device_map")


@contextmanager
def inputs_of(
    module: nn.Module, select: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden
) -> Iterator[list[torch.Tensor]]:
    """Collect the input of a head in each pass, reduced by ``select``: one list entry per pass."""
    rows: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: rows.append(select(args[0])))
    try:
        yield rows
    finally:
        hook.remove()


def copied(result: torch.Tensor | LogpStats) -> torch.Tensor | LogpStats:
    """Return copies of results: FSDP2 requires that a module's outputs are no views."""
    return result.clone() if isinstance(result, torch.Tensor) else LogpStats(*(value.clone() for value in result))


def _is_sharded(head: nn.Module) -> bool:
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return False
    return isinstance(head, FSDPModule)


def _call_with_forward(
    head: nn.Module, forward: Callable[[torch.Tensor], Any], hidden: torch.Tensor, name: str = "forward"
) -> Any:
    """Call a module and its hooks with another forward, in the place of its attribute ``name``."""
    if not calls_own_forward(head):
        raise TypeError("head: expected the forward of its class, it was replaced on the object")
    with replaced(head, name, forward):
        return head(hidden)


def _operands(head: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (hidden, weight, bias) such that ``hidden @ weight^T + bias`` are the head's logits."""
    if all(hasattr(head, name) for name in LORA):
        return _lora_operands(head, hidden)
    return hidden, *_linear_parameters(head)


def _linear_parameters(head: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    kind = original_of(head)
    plain = kind in (nn.Linear, DetLinear) or kind.__name__ in ("FSDPLinear", "FSDPDetLinear", "FSDPRowWiseDetLinear")
    if not plain or not isinstance(head, nn.Linear):
        raise TypeError(
            f"head: expected an nn.Linear or one with a LoRA adapter, got {kind.__module__}.{kind.__qualname__}; "
            "score its logits with fused_logp"
        )
    return head.weight, head.bias


def _lora_operands(head: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    weight, bias = _linear_parameters(head.base_layer)
    if head.disable_adapters or head.merged:
        return hidden, weight, bias
    parts, columns = [hidden], [weight]
    for name in head.active_adapters:
        if name not in head.lora_A:
            continue
        a, b = head.lora_A[name], head.lora_B[name]
        _check_adapter(head, name, b)
        parts.append(det_linear(hidden.to(a.weight.dtype), a.weight).to(hidden.dtype) * head.scaling[name])
        columns.append(b.weight.to(weight.dtype))
    if len(parts) == 1:
        return hidden, weight, bias
    # Rows are padded to a multiple of 8 elements, which the Hopper kernels need.
    padding = -sum(part.shape[1] for part in columns) % 8
    if padding:
        parts.append(hidden.new_zeros(*hidden.shape[:-1], padding))
        columns.append(weight.new_zeros(weight.shape[0], padding))
    return torch.cat(parts, -1), torch.cat(columns, -1), bias


def _check_adapter(head: Any, name: str, b: nn.Module) -> None:
    dropout = dict(head.lora_dropout).get(name)
    if isinstance(dropout, nn.Dropout) and dropout.p > 0 and dropout.training:
        raise ValueError(f"head: expected no active dropout in adapter {name!r}, got {dropout.p}")
    variants = getattr(head, "lora_variant", None) or {}
    if name in variants or (getattr(head, "use_dora", None) or {}).get(name):
        raise TypeError(f"head: adapter {name!r} is not plain LoRA but, for example, DoRA: merge it first")
    if getattr(b, "bias", None) is not None:
        raise TypeError(f"head: adapter {name!r} has a bias: merge it first")
