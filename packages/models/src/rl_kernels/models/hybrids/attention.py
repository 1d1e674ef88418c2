"""The full attention of hybrids: the output is multiplied by the sigmoid of a gate, which comes with the queries.

The forward of transformers' class calls ``torch.sigmoid``, which on a CPU rounds the end of a tensor differently.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from rl_kernels.models.activations import sigmoid
from rl_kernels.models.subclasses import subclass
from rl_kernels.models.swap import original_of

KINDS = ("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention")
PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}


def is_gated_attention(module: nn.Module) -> bool:
    """Say whether a module is the full attention of a hybrid of transformers, by the name of its class."""
    kind = original_of(module)
    return kind.__name__ in KINDS and kind.__module__.startswith("transformers.")


def gated_attention(module: Any) -> tuple[type[nn.Module] | None, str]:
    """Return the class that computes the gate alike everywhere, or None and the reason against it."""
    kind, parts = original_of(module), dict(module.named_children()).keys()
    if parts != PARTS:
        return None, f"{kind.__name__} has the parts {', '.join(sorted(parts))}, expected {', '.join(sorted(PARTS))}"
    return subclass(kind, (), _forward), ""


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    file, shape = sys.modules[original_of(self).__module__], hidden_states.shape[:-1]
    q, gate = self.q_proj(hidden_states).view(*shape, -1, 2 * self.head_dim).chunk(2, -1)
    k, v = (project(hidden_states).view(*shape, -1, self.head_dim) for project in (self.k_proj, self.v_proj))
    q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
    q, k = file.apply_rotary_pos_emb(q, k, *position_embeddings)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, file.eager_attention_forward)
    dropout = self.attention_dropout if self.training else 0.0
    out, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **options)
    return self.o_proj(out.reshape(*shape, -1) * sigmoid(gate.reshape(*shape, -1))), weights
