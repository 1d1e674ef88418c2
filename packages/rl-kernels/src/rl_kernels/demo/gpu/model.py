"""The policy: transformers' Llama with random weights, in BF16 or FP32."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.demo.gpu.settings import ModelSizes
from rl_kernels.demo.gpu.vocabulary import END, VOCAB


def llama(
    sizes: ModelSizes, positions: int, seed: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Return a ``LlamaForCausalLM``, the same weights for the same seed and device; its attention is SDPA.

    The usual deviation of 0.02 leaves the logits small: at first every token is about as likely as any other.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=sizes.width,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        # Made in its dtype: a cast to BF16 would round the frequencies of the rotary embedding too.
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
