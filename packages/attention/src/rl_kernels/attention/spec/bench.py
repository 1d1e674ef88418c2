"""The benchmark of det_attention: shapes, the products and bytes that cannot be avoided, and the peers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

from rl_kernels.core.testing import Case
from rl_kernels.lab.bench.definition import BOTH, FORWARD, GOALS, SMALL, Benchmark, Pass, Peer, Shape, Work, plain

FLEX = frozenset({"flex"})
NOT_CAUSAL = {"causal": False}
SETS = {
    GOALS: (
        Shape((4, 2048, 2048, 32, 8, 128)),
        Shape((2, 8192, 8192, 32, 8, 128), without=FLEX),
        Shape((1, 16384, 16384, 32, 8, 128), without=FLEX),
        Shape((4, 2048, 2048, 32, 8, 64)),
        Shape((4, 2048, 2048, 32, 4, 128), without=FLEX),
        Shape((4, 2048, 2048, 32, 8, 128), NOT_CAUSAL, "not causal", without=FLEX),
        Shape((64, 1, 2048, 32, 8, 128), note="decode", without=FLEX),
        Shape((128, 1, 4096, 32, 8, 128), note="decode", without=FLEX),
        Shape((8, 1, 8192, 32, 8, 128), note="decode", without=FLEX),
        Shape((1, 1, 32768, 32, 8, 128), note="decode", without=FLEX),
    ),
    SMALL: (
        Shape((1, 128, 128, 4, 2, 64)),
        Shape((2, 65, 257, 4, 1, 32), NOT_CAUSAL, "not causal"),
        Shape((4, 1, 700, 4, 1, 64), note="decode"),
    ),
}


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Return the attention with all scores in memory, as models write it."""
    queries, keys = q.shape[1], k.shape[1]
    keys_, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2).movedim(1, 2) for x in (k, v))
    score = q.movedim(1, 2) @ keys_.mT * q.shape[-1] ** -0.5
    if causal:
        sees = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        score = score.masked_fill(~sees, -torch.inf)
    return (score.softmax(-1, dtype=torch.float32).to(q.dtype) @ values).movedim(1, 2)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Return PyTorch's attention."""
    q_, k_, v_ = (x.movedim(1, 2) for x in (q, k, v))
    # It counts positions from the first key, which for one query is another mask.
    one = q.shape[1] == 1
    if causal and not one and q.shape[1] != k.shape[1]:
        raise ValueError("as many queries as keys, or one")
    return F.scaled_dot_product_attention(q_, k_, v_, is_causal=causal and not one, enable_gqa=True).movedim(1, 2)


def _only(name: str) -> Callable[[], AbstractContextManager[Any]]:
    def around() -> AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([getattr(SDPBackend, name)])

    return around


def flex() -> Callable[..., torch.Tensor]:
    """Return FlexAttention, compiled, with a mask of blocks that is made once for each shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    masks: dict[tuple[int, int], Any] = {}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
        sizes = q.shape[1], k.shape[1]
        if causal and sizes not in masks:
            shift = sizes[1] - sizes[0]
            masks[sizes] = create_block_mask(
                lambda b, h, i, j: i + shift >= j, None, None, *sizes, device=q.device.type
            )
        q_, k_, v_ = (x.movedim(1, 2) for x in (q, k, v))
        return compiled(q_, k_, v_, block_mask=masks[sizes] if causal else None, enable_gqa=True).movedim(1, 2)

    return call


def flash_attn() -> Callable[..., torch.Tensor]:
    """Import flash-attn's dense function."""
    from flash_attn import flash_attn_func

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=causal)

    return call


def passes(shape: Shape, itemsize: int) -> dict[str, Pass]:
    """Take two products forward and five backward, of the keys that are seen; read and write the operands."""
    batch, queries, keys, heads, kv_heads, head = shape.sizes
    sizes = {"batch": batch, "queries": queries, "keys": keys}
    of_heads = {"kv_heads": kv_heads, "group": heads // kv_heads, "head": head}
    case = Case(shape.label, {**sizes, **of_heads}, shape.options)
    seen = queries * keys
    if shape.options.get("causal", True):
        seen -= queries * (queries - 1) // 2
    product = 2.0 * batch * heads * head * seen
    size = itemsize * batch * head * (2 * queries * heads + 2 * keys * kv_heads)
    found = {FORWARD: Pass(case, Work(size, 2 * product))}
    if queries > 1:
        found[BOTH] = Pass(case, Work(3 * size, 7 * product), backward=True)
    return found


BENCH = Benchmark(
    shape=("B", "T", "S", "H", "Hkv", "D"),
    sets=SETS,
    passes=passes,
    peers={
        "eager": plain(eager, "all scores in memory"),
        "sdpa": plain(sdpa, "scaled_dot_product_attention as it comes"),
        "sdpa-flash": Peer(lambda: sdpa, around=_only("FLASH_ATTENTION"), note="PyTorch's FlashAttention-2"),
        "sdpa-cudnn": Peer(lambda: sdpa, around=_only("CUDNN_ATTENTION"), note="cuDNN, its backward not repeatable"),
        "sdpa-efficient": Peer(lambda: sdpa, around=_only("EFFICIENT_ATTENTION"), note="PyTorch's memory-efficient"),
        "flex": Peer(flex, note="FlexAttention, compiled"),
        "flash-attn": Peer(flash_attn, "flash-attn"),
    },
)
