"""The benchmark of det_attention: shapes, minimum work, and the peers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rl_kernels.attention.spec.cases import lengths
from rl_kernels.core.testing import Case
from rl_kernels.lab.bench.definition import BOTH, FORWARD, GOALS, HOST, SMALL, Benchmark, Pass, Peer, Shape, Work, plain

ONLY_DENSE = frozenset({"eager", "sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flash-attn", "flex"})
LARGE = frozenset({"eager", "sdpa-efficient", "flex"})
"""Peers that skip most shapes: too slow, or with all scores in memory."""
NOT_CAUSAL = {"causal": False}
WINDOW = {"window": (4095, 0)}
# Lengths up to the size in the table; int32, which all peers take.
PACKED = {"layout": "packed", "longest": True, "ints": torch.int32}
PAGED = {"layout": "paged", "ints": torch.int32}
LLAMA = (32, 8, 128)
"""Query heads, KV heads, head size."""
SETS = {
    GOALS: (
        Shape((4, 2048, 2048, *LLAMA)),
        *(Shape(sizes, without=LARGE) for sizes in ((2, 8192, 8192, *LLAMA), (1, 16384, 16384, *LLAMA))),
        Shape((4, 2048, 2048, *LLAMA), NOT_CAUSAL, "not causal", without=LARGE),
        Shape((4, 2048, 2048, 32, 4, 128), note="groups of 8", without=LARGE),
        Shape((4, 2048, 2048, 28, 4, 128), note="groups of 7", without=LARGE),
        Shape((1, 16384, 16384, *LLAMA), WINDOW, "window", without=ONLY_DENSE),
        Shape((16, 2048, 2048, *LLAMA), PACKED, "packed", without=ONLY_DENSE),
        *(
            Shape(sizes, without=LARGE)
            for sizes in ((4, 2048, 2048, 32, 8, 64), (1, 16384, 16384, 32, 8, 64), (4, 2048, 2048, 16, 8, 256))
        ),
    ),
    "decode": (
        *(
            Shape((batch, 1, keys, *LLAMA), note="decode", without=LARGE)
            for batch, keys in ((64, 2048), (128, 4096), (8, 8192), (1, 32768))
        ),
        Shape((64, 1, 2048, 32, 8, 64), note="decode", without=LARGE),
        *(
            Shape((64, 1, 2048, *LLAMA), {**PAGED, "page": page}, f"decode, pages of {page}", without=ONLY_DENSE)
            for page in (16, 64, 256)
        ),
    ),
    HOST: (
        Shape((1, 64, 64, *LLAMA), note="prompt", without=LARGE),
        Shape((1, 1, 64, *LLAMA), note="decode", without=LARGE),
    ),
    SMALL: (
        Shape((1, 128, 128, 4, 2, 64)),
        Shape((2, 65, 257, 4, 1, 32), NOT_CAUSAL, "not causal"),
        Shape((4, 1, 700, 4, 1, 64), note="decode"),
        Shape((4, 90, 90, 4, 2, 64), PACKED, "packed", without=ONLY_DENSE),
        Shape((4, 1, 700, 4, 1, 64), {**PAGED, "page": 64}, "decode, pages of 64", without=ONLY_DENSE),
    ),
}


FA3_LIBRARY = ("vllm_flash_attn", "_vllm_fa3_C.abi3.so")
FA3_ABSENT = (
    *("k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos"),
    *("rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "scheduler_metadata", "pack_gqa"),
    *("s_aux", "cp_tot_seqused_k", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k"),
)
FA3_PLAIN = {"softcap": 0.0, "is_rotary_interleaved": True, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}
FA3_PLAIN |= {"num_splits": 0}
"""Values of arguments that a call does not pass; the arguments in FA3_ABSENT are then None."""


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Return attention with all scores in memory, as eager models compute it."""
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
    # PyTorch's causal mask counts positions from the first key: for one query it would hide all later keys.
    is_single_query = q.shape[1] == 1
    if causal and not is_single_query and q.shape[1] != k.shape[1]:
        raise ValueError("as many queries as keys, or one")
    return F.scaled_dot_product_attention(
        q_, k_, v_, is_causal=causal and not is_single_query, enable_gqa=True
    ).movedim(1, 2)


def _only(name: str) -> Callable[[], AbstractContextManager[Any]]:
    def around() -> AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([getattr(SDPBackend, name)])

    return around


def flex() -> Callable[..., torch.Tensor]:
    """Return compiled FlexAttention; its block mask is made once for each shape."""
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


def fa3() -> Callable[..., torch.Tensor]:
    """Load FlashAttention-3 from vLLM's wheel, which has only the forward pass."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not there", name="vllm")
    torch.ops.load_library(str(Path(next(iter(spec.submodule_search_locations)), *FA3_LIBRARY)))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, **options: Any) -> torch.Tensor:
        shape = q.shape
        left, right = options.pop("window", (-1, -1))
        options["page_table"] = options.pop("block_table", None)
        if "cu_seqlens_q" not in options and options["page_table"] is None:
            # The library takes packed sequences, or pages.
            options |= {"max_seqlen_q": shape[1], "max_seqlen_k": k.shape[1]}
            options |= {"cu_seqlens_q": _starts(q), "cu_seqlens_k": _starts(k)}
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        arguments = {**dict.fromkeys(FA3_ABSENT), **FA3_PLAIN, "q": q, "k": k, "v": v, **options}
        arguments |= {"softmax_scale": shape[-1] ** -0.5, "is_causal": causal}
        arguments |= {"window_size_left": left, "window_size_right": right}
        return torch.ops._vllm_fa3_C.fwd(**arguments)[0].view(shape)

    return call


def _starts(x: torch.Tensor) -> torch.Tensor:
    """Return the cu_seqlens of ``[B, T, ...]``."""
    return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


def _triangle(count: int) -> int:
    return count * (count + 1) // 2 if count > 0 else 0


def work_of(case: Case) -> tuple[int, int, int]:
    """Return (queries, keys, pairs of a query and a key that it sees), summed over the sequences."""
    batch, queries, keys = (case.sizes[name] for name in ("batch", "queries", "keys"))
    sequences = zip(*lengths(case), strict=True) if "layout" in case.options else [(queries, keys)] * batch
    total_q = total_k = pairs = 0
    for count_q, count_k in sequences:
        total_q, total_k, pairs = total_q + count_q, total_k + count_k, pairs + count_q * count_k
        if case.options.get("causal", True):
            pairs -= count_q * (count_q - 1) // 2
        # Keys before the window: one more for each query, from the first query that has any.
        hidden = count_k - 1 - case.options.get("window", (count_k,))[0]
        pairs -= _triangle(hidden) - _triangle(hidden - count_q)
    return total_q, total_k, pairs


def passes(shape: Shape, itemsize: int) -> dict[str, Pass]:
    """Count two products forward and five backward, over visible keys only, and the bytes of the operands."""
    batch, queries, keys, heads, kv_heads, head = shape.sizes
    sizes = {"batch": batch, "queries": queries, "keys": keys}
    head_sizes = {"kv_heads": kv_heads, "group": heads // kv_heads, "head": head}
    case = Case(shape.label, {**sizes, **head_sizes}, shape.options)
    total_q, total_k, pairs = work_of(case)
    product = 2.0 * heads * head * pairs
    size = itemsize * head * (2 * total_q * heads + 2 * total_k * kv_heads)
    passes_by_name = {FORWARD: Pass(case, Work(size, 2 * product))}
    if queries > 1:
        passes_by_name[BOTH] = Pass(case, Work(3 * size, 7 * product), backward=True)
    return passes_by_name


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
        "fa3": Peer(fa3, "vllm", note="FlashAttention-3 of vLLM's wheel, which has no backward", passes=(FORWARD,)),
    },
)
