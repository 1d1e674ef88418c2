"""LoRA layers that compute with merged weights, because an engine that samples gets those.

PEFT adds ``s B (A x)`` to ``W x``; an engine that is sent merged weights computes ``W' x``, and rounds elsewhere. Here
a layer computes with ``W' = round(W + s B A)`` too, a copy that is formed in FP32 once after each change of A or B, and
PEFT's own ``merge`` hands out the same copy. Gradients of A and B are those of ``W + s B A``: the rounding passes the
gradient through. The copies take as much memory as the weights of all layers with an adapter.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from rl_kernels.det_gemm import det_gemm, det_linear
from rl_kernels.models.subclasses import subclass
from rl_kernels.models.swap import HOOK, calls_own_forward, class_swap, original_of

COPIES, UNMERGED = "_rl_kernels_merged", "_rl_kernels_unmerged"
"""Attributes of a layer: the ``_Copy`` of each adapter, and the weight without adapter while PEFT has them merged."""
_seen = {"steps": 0}
"""Has the number of optimizer steps in this process: kernels of some optimizers do not mark weights as changed."""


class _Copy(NamedTuple):
    """A merged weight, and the versions of what it was formed from."""

    weight: torch.Tensor
    sources: tuple[torch.Tensor, ...]
    versions: tuple[object, ...]


class MergedLora(nn.Module):
    """A mixin for PEFT's LoRA of a linear layer: with one active adapter, its product is that of the merged weight."""

    def forward(self: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Return ``x[..., K] @ W'^T + bias``; without an adapter, or with a merged one, as PEFT does."""
        if self.disable_adapters or self.merged:
            result: torch.Tensor = super().forward(x, *args, **options)
            return result
        name = _only(self.active_adapters)
        out = det_linear(x, merged_weight(self, name), self.base_layer.bias)
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
            out = _AdapterGradients.apply(out, x, a, b, self.scaling[name])
        return out

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put the merged weight in the place of the base layer's."""
        if self.merged:
            return
        name = _only(self.active_adapters if adapter_names is None else adapter_names)
        merged, weight = merged_weight(self, name), self.base_layer.weight
        setattr(self, UNMERGED, weight.data)
        weight.data = merged
        self.merged_adapters.append(name)

    def unmerge(self: Any) -> None:
        """Put the base layer's own weight back, as it was."""
        if self.merged:
            self.base_layer.weight.data = vars(self).pop(UNMERGED)
            self.merged_adapters.clear()


class _AdapterGradients(torch.autograd.Function):
    """Passes the output of a merged layer on; its gradient gives those of A and B, in FP32.

    The weight's gradient ``dW = g^T x``, whose chain rule has ``dA = s B^T dW`` and ``dB = s dW A^T``, is not formed:
    the products are taken in the order that needs r columns between them.
    """

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.scale = scale
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        rows, grads = x.flatten(0, -2).float(), grad.flatten(0, -2).float()
        grad_a = grad_b = None
        if ctx.needs_input_grad[2]:
            grad_a = det_gemm(det_gemm(grads, b.float()).t(), rows).mul_(ctx.scale)
        if ctx.needs_input_grad[3]:
            grad_b = det_gemm(grads.t(), det_gemm(rows, a.float().t())).mul_(ctx.scale)
        return grad, None, grad_a, grad_b, None


def merged_weight(layer: Any, name: str) -> torch.Tensor:
    """Return ``round(W + s B A)`` of a LoRA layer, recomputed in place if an optimizer stepped or a part changed."""
    sources = (layer.base_layer.weight, layer.lora_A[name].weight, layer.lora_B[name].weight)
    versions = (_seen["steps"], layer.scaling[name], *(each._version for each in sources))
    copies: dict[str, _Copy] = vars(layer).setdefault(COPIES, {})
    held = copies.get(name)
    if held is not None and held.versions == versions and all(map(operator.is_, held.sources, sources)):
        return held.weight
    reason = _why_not_adapter(layer, name)
    if reason is not None:
        raise ValueError(f"peft_config: expected plain LoRA, {reason}")
    with torch.no_grad(), torch.autocast(sources[0].device.type, enabled=False):
        weight, a, b = (each.detach() for each in sources)
        # In place where there is a copy: a CUDA graph reads it at its address.
        merged = torch.empty_like(weight) if held is None else held.weight
        merged.copy_(det_gemm(b.float(), a.float()).mul_(layer.scaling[name]).add_(weight))
    copies[name] = _Copy(merged, sources, versions)
    return merged


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers of a model to which PEFT added adapters, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters for which there is no merged weight.

    Raises:
        ValueError: there is none, or one is not plain LoRA of an ``nn.Linear``; the message names the module.
    """
    from peft.utils.other import TrainableTokensWrapper

    for name, module in model.named_modules():
        if isinstance(module, TrainableTokensWrapper):
            raise ValueError(f"trainable_token_indices: expected none, {name} has some; use modules_to_save")
    layers = lora_layers(model)
    if not layers:
        raise ValueError("peft_config: expected LoRA layers, the model has none")
    for name, layer in layers.items():
        reason = _why_not(layer)
        if reason is not None:
            raise ValueError(f"peft_config: expected plain LoRA of nn.Linear layers, {name} {reason}")


def merge_adapters(model: nn.Module) -> None:
    """Let the LoRA layers of a model, which ``check_adapters`` took, compute with merged weights from now on."""
    _count_steps()
    for layer in lora_layers(model).values():
        kind = original_of(layer)
        class_swap(subclass(kind, ("merged",), None, bases=(MergedLora, kind)), kind)(layer)


@functools.cache
def _count_steps() -> None:
    def count(*_: Any) -> None:
        _seen["steps"] += 1

    register_optimizer_step_post_hook(count)


def _why_not(layer: Any) -> str | None:
    """Return why a layer cannot compute with a merged weight, or None."""
    from peft.tuners.lora import Linear

    if original_of(layer) is not Linear:
        return f"is a {type(layer).__module__}.{type(layer).__name__}"
    base = layer.base_layer
    if not isinstance(base, nn.Linear) or HOOK in vars(base) or not calls_own_forward(layer):
        return f"is one of a {type(base).__name__}, or has hooks of accelerate"
    if layer.merged:
        return "is merged; call unmerge_adapter"
    if len(layer.active_adapters) != 1:
        return f"has {len(layer.active_adapters)} active adapters"
    return next(filter(None, (_why_not_adapter(layer, name) for name in layer.lora_A)), None)


def _why_not_adapter(layer: Any, name: str) -> str | None:
    if name in layer.lora_variant:
        return f"has a variant: {type(layer.lora_variant[name]).__name__}"
    if layer.lora_bias[name]:
        return "has lora_bias"
    dropout = layer.lora_dropout[name]
    if isinstance(dropout, nn.Dropout) and dropout.p > 0:
        return f"has lora_dropout {dropout.p}"
    return None


def _only(names: Any) -> str:
    if len(names) != 1:
        raise ValueError(f"adapters: expected one active adapter, got {len(names)}")
    name: str = names[0]
    return name
