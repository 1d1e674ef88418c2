"""The cases of det_attention: inputs and error budget."""

from __future__ import annotations

import random

import torch

from rl_kernels.attention import reference
from rl_kernels.attention.spec.cases_dimensions import DIMENSIONS
from rl_kernels.attention.spec.illegal import ILLEGAL
from rl_kernels.attention.spec.magnitudes import magnitudes
from rl_kernels.attention.spec.places import Piece, cache, integers, packed, paged
from rl_kernels.attention.spec.transforms import HYGIENE, TRANSFORMS
from rl_kernels.core.constants import KEY_SEGMENT as SEGMENT
from rl_kernels.core.testing import Case, Draw, Inputs, Spec

INTEGERS = {"cu_seqlens_q", "cu_seqlens_k", "k_start", "seqused_q", "seqused_k", "block_table"}
"""Integer tensors: the places of the sequences in q, k and v."""


def _sizes(batch: int, queries: int, keys: int, kv_heads: int, group: int, head: int) -> dict[str, int]:
    return {
        **{"batch": batch, "queries": queries, "keys": keys},
        **{"kv_heads": kv_heads, "group": group, "head": head},
    }


LSE = {"return_lse": True}
UNMASKED = {**LSE, "causal": False}
IN_LAYOUTS = ("invariance",)
CASES = (
    Case("plain", _sizes(2, 9, 9, 2, 2, 16)),
    Case("prompt", _sizes(2, 70, 70, 2, 2, 16), LSE),
    Case("not-causal", _sizes(2, 20, 75, 1, 3, 24), UNMASKED),
    Case("more-keys", _sizes(1, 7, 130, 2, 1, 16), LSE),
    Case("more-queries", _sizes(1, 40, 11, 1, 2, 16), LSE),
    Case("other-values", _sizes(1, 17, 33, 2, 2, 16), {**LSE, "value_head": 40}),
    Case("scaled", _sizes(1, 17, 17, 1, 2, 32), {"scale": 0.37}),
    Case("window", _sizes(2, 90, 90, 1, 2, 16), {**LSE, "window": (20, 5)}),
    Case("window-of-tiles", _sizes(1, 130, 130, 1, 1, 16), {**LSE, "window": (62, 0)}),
    Case("window-from-block-end", _sizes(1, 3, 83, 1, 2, 16), {**LSE, "window": (17, 0)}),
    Case("window-both", _sizes(1, 66, 140, 1, 2, 16), {**LSE, "causal": False, "window": (9, 70)}),
    Case("window-left", _sizes(1, 20, 150, 1, 1, 16), {**LSE, "window": (30, None)}),
    Case("softcap", _sizes(1, 33, 33, 2, 1, 16), {**LSE, "softcap": 2.0}),
    Case("sinks", _sizes(2, 21, 21, 2, 2, 16), {**LSE, "sinks": True}),
    Case("sinks-alone", _sizes(1, 30, 12, 1, 2, 16), {**LSE, "sinks": True}),
    Case("left-padded", _sizes(3, 35, 35, 1, 2, 16), {**LSE, "layout": "left"}),
    Case("dropped", _sizes(3, 20, 35, 1, 2, 16), {**LSE, "layout": "dropped", "window": (30, 0)}),
    Case("dropped-unseen", _sizes(3, 4, 90, 1, 2, 16), {**LSE, "layout": "dropped", "window": (200, 0)}),
    Case("block-edge", _sizes(2, 4, 66, 1, 2, 16), LSE),
    Case("right-padded", _sizes(3, 33, 33, 1, 2, 16), {**LSE, "layout": "right"}),
    Case("unused-queries-split", _sizes(4, 9, 1100, 1, 2, 16), {**LSE, "layout": "right"}),
    Case("packed", _sizes(5, 25, 25, 1, 2, 16), {**LSE, "layout": "packed"}),
    Case("packed-more-keys", _sizes(3, 2, 100, 1, 2, 16), {**LSE, "layout": "packed"}),
    Case("packed-right", _sizes(4, 20, 20, 1, 2, 16), {**LSE, "layout": "packed-right", "sinks": True}),
    Case("packed-keys", _sizes(4, 12, 90, 1, 2, 16), {**LSE, "layout": "packed", "causal": False, "longest": True}),
    Case("decode", _sizes(3, 1, 70, 2, 4, 16), {**LSE, "layout": "cache"}, grad=False),
    Case("speculative", _sizes(3, 4, 75, 1, 7, 16), {**LSE, "layout": "cache", "sinks": True}, grad=False),
    Case("chunk", _sizes(2, 20, 50, 1, 2, 16), {**LSE}, grad=False),
    Case("pages", _sizes(3, 1, 70, 1, 4, 16), {**LSE, "layout": "paged", "page": 16}, grad=False),
    Case("large-pages", _sizes(3, 2, 200, 1, 4, 16), {**LSE, "layout": "paged", "page": 128}, grad=False),
    Case(
        "pages-other-values",
        _sizes(2, 2, 50, 1, 2, 16),
        {**LSE, "layout": "paged", "page": 16, "value_head": 40},
        grad=False,
    ),
    Case("sevens-at-the-edge", _sizes(1, 10, 65, 1, 7, 16), LSE),
    Case("packed-pages", _sizes(4, 9, 60, 1, 2, 16), {"layout": "packed-paged", "page": 32}, grad=False),
    Case("segments", _sizes(1, 3, SEGMENT + 70, 1, 2, 16), {**LSE, "rising": True}),
    Case("two-segments", _sizes(1, 14, 2 * SEGMENT + 1, 1, 2, 16), {**UNMASKED, "value_head": 80}),
    Case("window-over-segments", _sizes(1, 66, 1400, 1, 1, 16), {**LSE, "window": (1200, 0)}),
    Case("rows-of-two-blocks", _sizes(1, 131, 131, 1, 1, 16), LSE),
    # The order of a sum shows in low bits of FP32, which BF16 rounds away.
    Case("two-segments-fp32", _sizes(1, 2, 2 * SEGMENT + 1, 1, 2, 16), UNMASKED, dtype="fp32", relations=IN_LAYOUTS),
    Case("rows-of-two-blocks-fp32", _sizes(1, 131, 131, 1, 1, 16), LSE, dtype="fp32", relations=IN_LAYOUTS),
    Case("peaked", _sizes(1, 20, 40, 1, 2, 16), {**LSE, "size": 3.0}),
    Case("llama", _sizes(1, 65, 65, 2, 4, 128), LSE, suite="full"),
    Case("qwen2", _sizes(1, 40, 40, 2, 7, 128), LSE, suite="full"),
    Case("gemma", _sizes(1, 33, 65, 2, 2, 256), {**LSE, "softcap": 50.0, "window": (32, 0)}, suite="full"),
    Case("phi", _sizes(1, 33, 65, 2, 1, 96), LSE, suite="full"),
    *DIMENSIONS,
)
EMPTY = (
    Case("no-sequences", _sizes(0, 3, 5, 1, 2, 16), LSE),
    Case("no-queries", _sizes(2, 0, 5, 1, 2, 16), LSE),
    Case("no-keys", _sizes(2, 3, 0, 1, 2, 16), LSE),
)
DRAWN = frozenset({"layout", "page", "sinks", "value_head", "longest", "rising", "size", "ints", "values"})
"""Options that shape the inputs; all others are passed on as keyword arguments."""
MULTIPLE = 8


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw ``q[batch, queries, kv_heads * group, head]``, keys and values, laid out as the case asks."""
    sizes, options = case.sizes, case.options
    heads, head = sizes["kv_heads"] * sizes["group"], _multiple(sizes["head"])
    counts = sizes["batch"], sizes["queries"], sizes["keys"]
    size = options.get("size", 1.0)
    q = draw.normal(*counts[:2], heads, head, scale=size)
    k = draw.normal(counts[0], counts[2], sizes["kv_heads"], head, scale=size)
    # The gradient of a score is a difference of sums over values, out among them, which was rounded.
    v = draw.normal(counts[0], counts[2], sizes["kv_heads"], _multiple(options.get("value_head", head)), scale=0.5)
    q, k, v = (_with_values(x, options.get("values")) for x in (q, k, v))
    if options.get("rising"):
        # Later keys have larger scores, so that every merge rescales what came before.
        ramp = torch.linspace(0.2, 3.0, max(counts[2], 1), dtype=torch.float64)[: counts[2], None, None]
        k = (k * ramp.to(k)).to(k.dtype)
    call = _laid_out(case, q, k, v)
    call |= {"causal": True, **{name: value for name, value in options.items() if name not in DRAWN}}
    if options.get("sinks"):
        call["sinks"] = draw.normal(heads)
    if options.get("longest"):
        for name in ("q", "k"):
            call[f"max_seqlen_{name}"] = counts["qk".index(name) + 1] + 3
    if options.get("ints"):
        call |= {name: call[name].to(options["ints"]) for name in INTEGERS & call.keys()}
    return call


def _multiple(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE


def _with_values(x: torch.Tensor, kind: str | None) -> torch.Tensor:
    if kind == "ties":
        return x.round()
    return x * {"small": 1e-6, "subnormal": 1e-40}.get(kind or "", 1.0)


def lengths(case: Case) -> tuple[list[int], list[int]]:
    """Return the numbers of queries and of keys of each sequence, for a packed, cached or paged case."""
    layout, source = case.options["layout"], _source(case)
    batch, queries, keys = (case.sizes[name] for name in ("batch", "queries", "keys"))
    counts_k = _draw_lengths(source, batch, keys, 0 if layout == "packed" else 1)
    if not layout.startswith("packed"):
        return [queries] * batch, counts_k
    # A prompt has as many queries as keys.
    if queries == keys:
        return counts_k, counts_k
    return [min(pair) for pair in zip(_draw_lengths(source, batch, queries), counts_k, strict=True)], counts_k


def _source(case: Case) -> random.Random:
    """Seed lengths by the case alone: other values of a case then have the same shapes."""
    return random.Random(case.drawn_as or case.name)


def _draw_lengths(source: random.Random, count: int, most: int, least: int = 0) -> list[int]:
    """Draw ``count`` lengths: first ``most``, then ``least``, then random ones."""
    random_lengths = [source.randint(min(least, most), most) for _ in range(count)]
    return [most, min(least, most), *random_lengths[2:]][:count]


def _laid_out(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Inputs:
    layout = case.options.get("layout")
    if layout is None:
        return {"q": q, "k": k, "v": v}
    batch = q.shape[0]
    if layout == "left":
        return {"q": q, "k": k, "v": v, "k_start": integers(_draw_lengths(_source(case), batch, k.shape[1] // 2), q)}
    if layout == "dropped":
        # Dropped keys within the window; padding; so many dropped that the kept keys lie in two segments.
        starts = [(-9, 4, -3 * SEGMENT - 1000)[b % 3] for b in range(batch)]
        return {"q": q, "k": k, "v": v, "k_start": integers([min(start, k.shape[1]) for start in starts], q)}
    if layout == "right":
        return {"q": q, "k": k, "v": v, "seqused_q": integers(_draw_lengths(_source(case), batch, q.shape[1]), q)}
    counts_q, counts_k = lengths(case)
    rows = zip(q, k, v, counts_q, counts_k, strict=True)
    pieces = [Piece(a[:t], b[:s], c[:s]) for a, b, c, t, s in rows]
    if layout == "packed":
        return packed(pieces)
    if layout == "packed-right":
        return {**packed(pieces), "seqused_q": integers([max(count - 3, 0) for count in counts_q], q)}
    if layout == "cache":
        return cache(pieces, 3, 0.0)
    order = list(range(sum(counts_k) + batch + 2))
    _source(case).shuffle(order)
    return paged(pieces, case.options["page"], 0.0, torch.tensor(order))


def waits(call: Inputs, backend: str | None) -> str | None:
    """Return the reason why a call reads from the device, which syncs, or None."""
    if backend == "native" and INTEGERS & call.keys():
        return "native reads lengths on the host"
    missing = [f"max_seqlen_{x}" for x in "qk" if f"cu_seqlens_{x}" in call and f"max_seqlen_{x}" not in call]
    return f"without {' and '.join(missing)} the device is asked" if missing else None


SPEC = Spec(
    cases=CASES,
    inputs=inputs,
    references={"": reference.det_attention},
    classes={
        "out": "attention",
        "lse": "logprob",
        **{f"gradient:{name}": "attention" for name in ("q", "k", "v", "sinks")},
    },
    differentiable=("q", "k", "v", "sinks"),
    magnitudes=magnitudes,
    transforms=TRANSFORMS,
    illegal=ILLEGAL,
    hygiene=HYGIENE,
    empty=EMPTY,
    unread=frozenset({"max_seqlen_q", "max_seqlen_k", "process_group", "validate", "backend"}),
    output="out",
    spared=frozenset({"return_lse"}),
    waits=waits,
)
