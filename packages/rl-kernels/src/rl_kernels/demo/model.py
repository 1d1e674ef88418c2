"""The policy: a small causal transformer over bytes, and the cache of keys and values that decodes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from rl_kernels.demo.arithmetic import Arithmetic
from rl_kernels.demo.tokenizer import VOCAB
from rl_kernels.det_gemm import DetLinear


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer."""

    positions: int
    vocab: int = VOCAB
    width: int = 64
    heads: int = 4
    layers: int = 2


class Cache:
    """Keys and values of every layer for up to ``positions`` tokens of each row; ``length`` positions are filled."""

    def __init__(self, config: ModelConfig, rows: int, dtype: torch.dtype = torch.float32) -> None:
        shape = (config.layers, rows, config.heads, config.positions, config.width // config.heads)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.length = 0

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``k, v [B, H, Q, d]`` behind what is there; return all keys and values ``[B, H, length + Q, d]``."""
        end = self.length + k.shape[2]
        for store, new in ((self.keys[layer], k), (self.values[layer], v)):
            store[:, :, self.length : end] = new
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Block(nn.Module):
    """Attention, then two linear layers with a ReLU between; each normalised before and added to its input."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width = config.width
        self.layer, self.heads = layer, config.heads
        self.attention_gain, self.feed_gain = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.qkv = DetLinear(width, 3 * width, bias=False)
        self.mix = DetLinear(width, width, bias=False)
        self.up = DetLinear(width, 4 * width, bias=False)
        self.down = DetLinear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, arithmetic: Arithmetic, cache: Cache | None) -> torch.Tensor:
        """Return ``[B, Q, D]`` from ``x[B, Q, D]``; with a cache, Q positions behind those in it."""
        rows, queries, width = x.shape
        qkv = arithmetic.linear(self.qkv, arithmetic.rms_norm(x, self.attention_gain))
        q, k, v = qkv.view(rows, queries, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        mixed = arithmetic.attention(q, k, v).transpose(1, 2).reshape(rows, queries, width)
        x = x + arithmetic.linear(self.mix, mixed)
        inner = arithmetic.linear(self.up, arithmetic.rms_norm(x, self.feed_gain)).relu()
        return x + arithmetic.linear(self.down, inner)


class Policy(nn.Module):
    """Tokens to hidden states; ``head.weight`` turns those into logits."""

    def __init__(self, config: ModelConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.gain = nn.Parameter(torch.ones(config.width))
        self.head = DetLinear(config.width, config.vocab, bias=False)
        self._initialise(generator)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_(std=0.5, generator=generator)
            elif isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5, generator=generator)
        # Small logits: at first every byte is about as likely as any other.
        self.head.weight.mul_(0.1)

    def forward(self, tokens: torch.Tensor, arithmetic: Arithmetic, cache: Cache | None = None) -> torch.Tensor:
        """Return hidden states ``[B, Q, D]`` of ``tokens[B, Q]``, int64, which stand behind the tokens in the cache."""
        start = 0 if cache is None else cache.length
        places = torch.arange(start, start + tokens.shape[1])
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x, arithmetic, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
        return arithmetic.rms_norm(x, self.gain)

    def cache(self, rows: int) -> Cache:
        """Return an empty cache in the dtype of the weights."""
        return Cache(self.config, rows, self.head.weight.dtype)
