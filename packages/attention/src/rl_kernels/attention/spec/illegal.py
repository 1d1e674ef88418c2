"""Calls of det_attention that must raise: the mistake of each, and what its message must say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_kernels.core.testing import IllegalCall, Inputs, edited, given
from rl_kernels.core.testing.spec import Change

PACKED, CACHE, PAGES, LEFT, RIGHT = "packed", "decode", "pages", "left-padded", "right-padded"


def _numbers(name: str, *values: int) -> Change:
    """Give each sequence one of the numbers, in turn."""

    def change(call: Inputs) -> Inputs:
        batch = call["q"].shape[0]
        found = torch.tensor((list(values) * batch)[:batch], device=call["q"].device)
        return {**call, name: found}

    return change


def _of(name: str, edit: Callable[[Inputs], Any]) -> Change:
    return lambda call: {**call, name: edit(call)}


ILLEGAL = (
    IllegalCall("q not a tensor", given(q=[1.0]), TypeError, "q: expected a tensor"),
    IllegalCall("q of FP64", edited("q", torch.Tensor.double), TypeError, "q: expected dtype"),
    IllegalCall("q of three dims", edited("q", lambda x: x[0]), ValueError, "q: expected 4 dims"),
    IllegalCall("k of three dims", edited("k", lambda x: x[0]), ValueError, "k: expected 4 dims"),
    IllegalCall("k of integers", edited("k", torch.Tensor.int), TypeError, "k: expected dtype"),
    IllegalCall(
        "v of another dtype",
        edited("v", lambda x: x.to(torch.float16 if x.dtype != torch.float16 else torch.float32)),
        TypeError,
        "v: expected dtype",
    ),
    IllegalCall("k elsewhere", edited("k", lambda x: x.to("meta")), ValueError, "k: expected device"),
    IllegalCall("head size odd", edited("q", lambda x: x[..., :-1]), ValueError, "q: expected a head size"),
    IllegalCall("head size of v odd", edited("v", lambda x: x[..., :-1]), ValueError, "v: expected a head size"),
    IllegalCall(
        "another head size", _of("k", lambda c: torch.cat((c["k"],) * 2, -1)), ValueError, "k: expected head size"
    ),
    IllegalCall("v of another length", edited("v", lambda x: x[:, 1:]), ValueError, "v: expected shape"),
    IllegalCall(
        "heads that do not divide",
        lambda c: {**c, **{n: torch.cat((c["q"][:, :1],) * 2, 2).expand(-1, 3, -1, -1) for n in ("k", "v")}},
        ValueError,
        "k: expected a number of heads",
    ),
    IllegalCall(
        "no heads",
        lambda c: {**c, "k": c["k"][:, :, :0], "v": c["v"][:, :, :0]},
        ValueError,
        "k: expected a number of heads",
    ),
    IllegalCall(
        "another batch",
        lambda c: {**c, **{n: torch.cat((c[n], c[n])) for n in ("k", "v")}},
        ValueError,
        r"k: expected \d+ sequences",
    ),
    IllegalCall("scale of 0", given(scale=0.0), ValueError, "scale: expected a number > 0"),
    IllegalCall("scale NaN", given(scale=float("nan")), ValueError, "scale: expected a finite number"),
    IllegalCall("scale text", given(scale="1"), TypeError, "scale: expected a number"),
    IllegalCall("softcap negative", given(softcap=-1.0), ValueError, "softcap: expected a number >= 0"),
    IllegalCall("softcap infinite", given(softcap=float("inf")), ValueError, "softcap: expected a finite number"),
    IllegalCall("causal a number", given(causal=1), TypeError, "causal: expected a bool"),
    IllegalCall("return_lse a number", given(return_lse=1), TypeError, "return_lse: expected a bool"),
    IllegalCall("window a number", given(window=5), TypeError, r"window: expected \(left, right\)"),
    IllegalCall("window of floats", given(window=(5.0, 0)), TypeError, "window: expected an integer"),
    IllegalCall("window negative", given(window=(-2, 0)), ValueError, "window: expected an integer >= 0"),
    IllegalCall("window of 70 bits", given(window=(2**70, 0)), ValueError, "window: expected an integer <="),
    IllegalCall(
        "sinks of another shape", _of("sinks", lambda c: c["q"][0, 0, :, 0][:-1]), ValueError, "sinks: expected shape"
    ),
    IllegalCall(
        "sinks of integers",
        _of("sinks", lambda c: torch.ones(4, dtype=torch.int64, device=c["q"].device)),
        TypeError,
        "sinks: expected dtype",
    ),
    IllegalCall("unknown backend", given(backend="no-such"), ValueError, "backend: det_attention has no backend"),
    IllegalCall("backend not a name", given(backend=3), TypeError, "backend: expected a name"),
    IllegalCall("longest without packing", given(max_seqlen_q=3), ValueError, "max_seqlen_q: expected None without"),
    IllegalCall(
        "packed keys alone",
        _of("cu_seqlens_k", lambda c: torch.tensor([0, 1], device=c["q"].device)),
        ValueError,
        "k: expected 3 dims",
    ),
    IllegalCall(
        "pages without lengths",
        _of("block_table", lambda c: torch.zeros((len(c["q"]), 1), dtype=torch.int64, device=c["q"].device)),
        ValueError,
        "seqused_k: expected the number",
    ),
    IllegalCall(
        "start of floats", _of("k_start", lambda c: c["q"][:, 0, 0, 0].float()), TypeError, "k_start: expected dtype"
    ),
    IllegalCall(
        "start of another shape",
        _of("k_start", lambda c: torch.zeros(len(c["q"]) + 1, dtype=torch.int64, device=c["q"].device)),
        ValueError,
        "k_start: expected shape",
    ),
    IllegalCall(
        "start negative without a window", _numbers("k_start", -1), ValueError, r"k_start: expected values in \[0"
    ),
    IllegalCall(
        "start negative with a window that is open on the left",
        lambda c: {**_numbers("k_start", -1)(c), "window": (None, 0)},
        ValueError,
        r"k_start: expected values in \[0",
    ),
    IllegalCall("start beyond the end", _numbers("k_start", 10**6), ValueError, r"k_start: expected values in \[0"),
    IllegalCall(
        "more keys than there are", _numbers("seqused_k", 10**6), ValueError, r"seqused_k: expected values in \[0"
    ),
    IllegalCall(
        "more queries than there are", _numbers("seqused_q", 10**6), ValueError, r"seqused_q: expected values in \[0"
    ),
    IllegalCall(
        "start beyond the keys in use",
        lambda c: {
            **_numbers("k_start", 1)(c),
            **{"seqused_k": torch.zeros(len(c["q"]), dtype=torch.int64, device=c["q"].device)},
        },
        ValueError,
        "k_start: expected values of at most seqused_k",
    ),
    IllegalCall(
        "packed with a start",
        _of("k_start", lambda c: c["cu_seqlens_q"][:-1]),
        ValueError,
        "k_start: expected None with cu_seqlens_k",
        PACKED,
    ),
    IllegalCall(
        "cumulative of floats",
        edited("cu_seqlens_q", torch.Tensor.float),
        TypeError,
        "cu_seqlens_q: expected dtype",
        PACKED,
    ),
    IllegalCall(
        "cumulative from 1",
        edited("cu_seqlens_q", lambda x: x + 1),
        ValueError,
        "cu_seqlens_q: expected numbers that ascend",
        PACKED,
    ),
    IllegalCall(
        "cumulative to too little",
        edited("cu_seqlens_k", lambda x: x.clamp(max=int(x[-1]) - 1)),
        ValueError,
        "cu_seqlens_k: expected numbers that ascend",
        PACKED,
    ),
    IllegalCall(
        "cumulative that descends",
        edited("cu_seqlens_k", lambda x: torch.cat((x[:1], x[-1:] + 1, x[2:])) if len(x) > 2 else x + 1),
        ValueError,
        "cu_seqlens_k: expected numbers that ascend",
        PACKED,
    ),
    IllegalCall(
        "cumulative of nothing",
        lambda c: {**c, "cu_seqlens_q": c["cu_seqlens_q"][:0]},
        ValueError,
        "cu_seqlens_q: expected at least 1",
        PACKED,
    ),
    IllegalCall(
        "another number of sequences",
        edited("cu_seqlens_k", lambda x: torch.cat((x, x[-1:]))),
        ValueError,
        "cu_seqlens_k: expected shape",
        PACKED,
    ),
    IllegalCall("longest too short", given(max_seqlen_q=0), ValueError, "max_seqlen_q: expected at least", PACKED),
    IllegalCall("longest a float", given(max_seqlen_k=3.0), TypeError, "max_seqlen_k: expected an integer", PACKED),
    IllegalCall(
        "page size odd",
        lambda c: {**c, "k": c["k"][:, :-1], "v": c["v"][:, :-1]},
        ValueError,
        "k: expected a page size",
        PAGES,
    ),
    IllegalCall(
        "page that does not exist",
        edited("block_table", lambda x: x + 10**6),
        ValueError,
        r"block_table: expected values in \[0",
        PAGES,
    ),
    IllegalCall(
        "another number of tables", edited("block_table", lambda x: x[:-1]), ValueError, "block_table: expected", PAGES
    ),
    IllegalCall(
        "more keys than pages",
        edited("seqused_k", lambda x: x + 10**6),
        ValueError,
        r"seqused_k: expected values in \[0",
        PAGES,
    ),
    IllegalCall(
        "more keys than a row of the table has room for",
        _of("seqused_k", lambda c: torch.full_like(c["seqused_k"], c["block_table"].shape[1] * c["k"].shape[1] + 1)),
        ValueError,
        r"seqused_k: expected values in \[0",
        PAGES,
    ),
    IllegalCall(
        "pages with a start",
        _of("k_start", lambda c: c["seqused_k"]),
        ValueError,
        "k_start: expected None with block_table",
        PAGES,
    ),
    IllegalCall(
        "gradient of a cache",
        edited("k", lambda x: x.clone().requires_grad_()),
        ValueError,
        "k: expected a tensor that does not require grad",
        CACHE,
    ),
)
