"""Gated DeltaNet layers: a convolution over four tokens, gates, the gated delta rule and a gated norm.

A token's bits follow from its own sequence up to that token: alone, padded, packed, in pieces, and token by token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_kernels.core.validate import HALF_AND_FLOAT
from rl_kernels.gated_delta import causal_conv1d
from rl_kernels.gated_delta.checks import SIZES
from rl_kernels.gated_delta.conv_inputs import TAPS
from rl_kernels.models.hybrids.gates import gates
from rl_kernels.models.hybrids.rule import delta_rule
from rl_kernels.models.subclasses import subclass
from rl_kernels.models.swap import HOOK, original_of

CONVOLUTION = "conv1d"
"""Name of the child whose weight the layer reads, without calling it."""
JOINED = {"in_proj_qkvz", "in_proj_ba", "conv1d", "norm", "out_proj"}
SEPARATE = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj"}
KINDS = {"Qwen3NextGatedDeltaNet": JOINED, "Qwen3_5GatedDeltaNet": SEPARATE, "Qwen3_5MoeGatedDeltaNet": SEPARATE}
"""Names of the classes, and the parts that their layers have."""


def is_delta_net(module: nn.Module) -> bool:
    """Say whether a module is a Gated DeltaNet of transformers, by the name of its class."""
    kind = original_of(module)
    return kind.__name__ in KINDS and kind.__module__.startswith("transformers.")


def delta_net(module: Any) -> tuple[type[nn.Module] | None, str]:
    """Return the class that computes a layer by ``gated_delta_rule``, or None and the reason against it."""
    kind = original_of(module)
    reason = _why_not(module, KINDS[kind.__name__])
    if reason is not None:
        return None, f"{kind.__name__}: {reason}"
    return subclass(kind, (), _forward), ""


def _why_not(module: Any, parts: set[str]) -> str | None:
    children = dict(module.named_children())
    if children.keys() != parts:
        return f"its parts are {', '.join(children)}"
    if not isinstance(module.conv1d, nn.Conv1d):
        return f"expected an nn.Conv1d as conv1d, whose weight the layer reads, got a {type(module.conv1d).__name__}"
    taps = module.conv1d.kernel_size[0]
    if taps != TAPS:
        return f"expected linear_conv_kernel_dim {TAPS}, got {taps}"
    if module.activation not in ("silu", "swish"):
        return f"expected the hidden_act silu, got {module.activation}"
    for name in ("head_k_dim", "head_v_dim"):
        if getattr(module, name) not in SIZES:
            return f"expected a {name} of {SIZES}, got {getattr(module, name)}"
    if module.num_v_heads % module.num_k_heads:
        return f"expected num_v_heads that num_k_heads divides, got {module.num_v_heads} and {module.num_k_heads}"
    if module.conv1d.weight.dtype not in HALF_AND_FLOAT:
        return f"the weight of its convolution is {module.conv1d.weight.dtype}, expected FP32, BF16 or FP16"
    return None


def _forward(
    self: Any, hidden_states: torch.Tensor, cache_params: Any = None, attention_mask: Any = None, **options: Any
) -> torch.Tensor:
    if HOOK in vars(self.conv1d):
        # accelerate's hook, which loads a weight that it offloads, would run in a call of the convolution.
        self.conv1d._hf_hook.pre_forward(self.conv1d)
    try:
        return _computed(self, hidden_states, cache_params, attention_mask, options)
    finally:
        if HOOK in vars(self.conv1d):
            self.conv1d._hf_hook.post_forward(self.conv1d, ())


def _computed(
    self: Any, hidden_states: torch.Tensor, cache: Any, mask: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    layout = _layout(hidden_states, cache, mask, options)
    shape, flat = hidden_states.shape[:2], layout.get("cu_seqlens") is not None
    mixed, z, b, a = _projected(self, hidden_states)
    if flat:
        mixed, b, a = (x.flatten(0, 1)[None] for x in (mixed, b, a))
    states = None if cache is None else _states(self, cache, mixed)
    mixed = _convolved(self, mixed, states, layout)
    q, k, v = mixed.split((self.key_dim, self.key_dim, self.value_dim), -1)
    q, k = (x.unflatten(-1, (self.num_k_heads, self.head_k_dim)) for x in (q, k))
    v = v.unflatten(-1, (self.num_v_heads, self.head_v_dim))
    operands = (q, k, v, *gates(a, b, self.A_log, self.dt_bias))
    out = delta_rule(*operands, **layout) if states is None else states.attend(operands, layout)
    heads = *shape, self.num_v_heads, self.head_v_dim
    result: torch.Tensor = self.out_proj(self.norm(out.view(heads), z.view(heads)).flatten(2))
    return result


def _layout(
    hidden_states: torch.Tensor, cache: Any, mask: torch.Tensor | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of the operators that say where sequences begin."""
    bounds = options.get("cu_seq_lens_q")
    if bounds is not None:
        if cache is not None:
            raise ValueError("use_cache: expected False with packed sequences, which a cache cannot continue")
        return {"cu_seqlens": bounds, "validate": False}
    if options.get("seq_idx") is not None:
        raise ValueError("seq_idx: expected packed sequences by position_ids or cu_seq_lens_q, not by seq_idx alone")
    if mask is None:
        return {"validate": False}
    # The number of tokens before the first one that is not padding.
    start = ((mask.to(hidden_states.device) != 0).cumsum(1) == 0).sum(1)
    return {"start": start, "validate": False}


def _projected(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the inputs of the convolution ``[B, T, D]``, z, b and a."""
    if "in_proj_qkv" in self._modules:
        return tuple(
            project(hidden_states) for project in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        )
    joined, gating = self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
    q, k, v, z, b, a = self.fix_query_key_value_ordering(joined, gating)
    return torch.cat([x.flatten(2) for x in (q, k, v)], -1), z, b, a


def _states(self: Any, cache: Any, mixed: torch.Tensor) -> Any:
    """Return the states of this layer in a cache of transformers, empty ones before the first tokens."""
    from rl_kernels.models.hybrids.states import states_of

    return states_of(cache, self, mixed)


def _convolved(self: Any, mixed: torch.Tensor, states: Any, layout: dict[str, Any]) -> torch.Tensor:
    conv = self.conv1d
    if not isinstance(conv, nn.Conv1d):
        raise ValueError(f"conv1d: expected an nn.Conv1d, whose weight the layer reads, got a {type(conv).__name__}")
    weight, bias = conv.weight.squeeze(1), conv.bias
    if states is None:
        return causal_conv1d(mixed, weight, bias, **layout)
    return states.convolve(mixed, weight, bias, layout)
