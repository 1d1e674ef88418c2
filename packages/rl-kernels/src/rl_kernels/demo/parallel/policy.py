"""The demo's policy, cut over ranks: attention by heads, the other layers by columns and rows."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn
from torch.distributed import ProcessGroup

from rl_kernels.demo.arithmetic import Arithmetic
from rl_kernels.demo.model import Block, Cache, ModelConfig, Policy
from rl_kernels.models.parallel import ColumnParallel, RowParallel
from rl_kernels.models.parallel.ranks import Ranks

SEGMENTS = 4
"""Segments of a sum: the narrowest layer has 64 inputs, 16 for each."""


class CutBlock(nn.Module):
    """A ``Block`` with this rank's heads and its part of the feed-forward layers."""

    def __init__(self, block: Block, ranks: Ranks) -> None:
        super().__init__()
        self.layer, self.heads = block.layer, block.heads // ranks.size
        self.attention_gain, self.feed_gain = block.attention_gain, block.feed_gain
        parts = block.qkv.weight.detach().chunk(3)
        self.q, self.k, self.v = (_linear(part) for part in parts)
        self.mix, self.up, self.down = block.mix, block.up, block.down
        for layer in (self.q, self.k, self.v, self.up):
            ColumnParallel(ranks).apply(layer)
        for layer in (self.mix, self.down):
            RowParallel(ranks).apply(layer)

    def forward(self, x: torch.Tensor, arithmetic: Arithmetic, cache: Cache | None) -> torch.Tensor:
        """Return ``[B, Q, D]`` from ``x[B, Q, D]``, which every rank has."""
        normed = arithmetic.rms_norm(x, self.attention_gain)
        q, k, v = (
            arithmetic.linear(layer, normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        mixed = arithmetic.attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + arithmetic.linear(self.mix, mixed)
        inner = arithmetic.linear(self.up, arithmetic.rms_norm(x, self.feed_gain)).relu()
        return x + arithmetic.linear(self.down, inner)


class CutPolicy(Policy):
    """A policy whose blocks are cut; its cache holds this rank's heads."""

    size: int

    def cache(self, rows: int) -> Cache:
        """Return an empty cache for the heads of this rank."""
        config = self.config
        part: ModelConfig = replace(config, heads=config.heads // self.size, width=config.width // self.size)
        return Cache(part, rows, self.head.weight.dtype)


def cut(policy: Policy, group: ProcessGroup | None) -> Policy:
    """Return a copy of a policy, cut over a group; without one it has the same sums in one process."""
    made = copy.deepcopy(policy)
    ranks = Ranks(group, SEGMENTS, cuts_tokens=False)
    blocks = [block for block in made.blocks if isinstance(block, Block)]
    made.blocks = nn.ModuleList(CutBlock(block, ranks) for block in blocks)
    made.__class__ = CutPolicy
    vars(made)["size"] = ranks.size
    return made


def _linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return layer
