"""The policies: a small causal transformer for a CPU, and transformers' Llama. Both return hidden states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_kernels.demo.task import Settings


def make(settings: Settings, device: torch.device, dtype: str) -> Any:
    """Return a policy with the random weights of the seed, the same for all dtypes but for rounding."""
    torch.manual_seed(settings.seed)
    precision = {"FP32": torch.float32, "BF16": torch.bfloat16}[dtype]
    with torch.device(device):
        return Llama(settings, precision) if settings.llama else Policy(settings).to(precision)


class Llama(nn.Module):
    """A ``LlamaForCausalLM``; at first every token is about as likely as any other."""

    def __init__(self, settings: Settings, dtype: torch.dtype) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

        sizes: dict[str, Any] = {"hidden_size": settings.width, "intermediate_size": settings.feed_forward}
        sizes |= {"num_hidden_layers": settings.layers, "max_position_embeddings": 2 * (settings.longest + 1)}
        sizes |= {"num_attention_heads": settings.heads, "num_key_value_heads": settings.kv_heads}
        sizes |= {"bos_token_id": None, "eos_token_id": settings.end, "pad_token_id": None}
        config = LlamaConfig(vocab_size=settings.end + 1, **sizes)
        # Made in its dtype: a cast to BF16 would round the frequencies of the rotary embedding too.
        self.inner: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        self.cache = lambda: DynamicCache(config=config)

    @property
    def head(self) -> Any:
        """The linear layer from hidden states to logits."""
        return self.inner.lm_head

    def forward(self, tokens: Tensor, cache: Any = None) -> Any:
        """Return hidden states ``[B, Q, D]`` of ``tokens[B, Q]``, which stand behind the tokens in the cache."""
        return self.inner.model(input_ids=tokens, past_key_values=cache, use_cache=cache is not None).last_hidden_state


class Block(nn.Module):
    """Attention, then two linear layers with a ReLU in between; both normalize their input and are added to it."""

    def __init__(self, width: int, feed_forward: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.attention_norm, self.feed_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, feed_forward, bias=False), nn.Linear(feed_forward, width, bias=False)

    def forward(self, x: Tensor, attend: Any, sees: Tensor, cache: dict[Any, Any] | None) -> Any:
        """Return ``[B, Q, D]`` from ``x[B, Q, D]``; rows of ``qkv.weight`` lie head by head: ranks can cut it."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, 3, self.head_size)).permute(3, 0, 2, 1, 4)
        if cache is not None:
            before = cache.get(self, (k[:, :, :0], v[:, :, :0]))
            k, v = cache[self] = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
        x = x + self.mix(attend(q, k, v, sees).transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.feed_norm(x)).relu())


class Policy(nn.Module):
    """Tokens to hidden states; ``head`` turns hidden states into logits, ``attend`` computes attention."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, size = settings.width, settings.end + 1
        self.attend: Any = F.scaled_dot_product_attention
        self.cache = dict[Any, Any]
        self.token, self.position = nn.Embedding(size, width), nn.Embedding(2 * (settings.longest + 1), width)
        blocks = (Block(width, settings.feed_forward, settings.heads) for _ in range(settings.layers))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.5)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        # Small logits: at first every token is about as likely as any other.
        self.head.weight.data.mul_(0.1)

    def forward(self, tokens: Tensor, cache: dict[Any, Any] | None = None) -> Any:
        """Return hidden states ``[B, Q, D]`` of ``tokens[B, Q]``, which stand behind the tokens in the cache."""
        start = cache[self.blocks[0]][0].shape[2] if cache else 0
        x = self.token(tokens) + self.position(torch.arange(start, start + tokens.shape[1]))
        sees = torch.ones(tokens.shape[1], start + tokens.shape[1], dtype=torch.bool).tril(start)
        for block in self.blocks:
            x = block(x, self.attend, sees, cache)
        return self.norm(x)


def ordered_attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Return attention whose bits do not depend on the batch, faster than ``det_attention`` on so few tokens.

    A score is a tree of additions over the head, whose size is a power of two, and keys are added one after the other;
    keys that a query does not see add 0. Computed in FP32, rounded once to the dtype of ``q``.
    """
    dtype, (q, k, v) = q.dtype, (x.float() for x in (q, k, v))
    products = q[..., :, None, :] * k[..., None, :, :]
    while products.shape[-1] > 1:
        low, high = products.chunk(2, -1)
        products = low + high
    scores = (products[..., 0] * q.shape[-1] ** -0.5).masked_fill(~sees, -torch.inf)
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    total, mixed = torch.zeros_like(weights[..., :1]), torch.zeros_like(q)
    for key, weight in enumerate(weights[..., None].unbind(-2)):
        total, mixed = total + weight, mixed + weight * v[..., key, None, :]
    return (mixed / total).to(dtype)
