"""The cases of fused_logp: inputs, error budget, promised layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rl_kernels.core.testing import (
    IGNORED,
    Case,
    Draw,
    Inputs,
    RowLayout,
    Spec,
    Variant,
    options,
)
from rl_kernels.fused_logp import reference
from rl_kernels.fused_logp.illegal import ILLEGAL

CASES = (
    Case("plain", {"batch": 2, "seq": 16, "vocab": 257}),
    Case("stats", {"batch": 2, "seq": 9, "vocab": 1000}, {"return_stats": True}),
    Case("temperature", {"batch": 2, "seq": 5, "vocab": 333}, {"temperature": 0.7, "return_stats": True}),
    Case(
        "temperature-per-token", {"batch": 3, "seq": 5, "vocab": 129}, {"temperature": "tensor", "return_stats": True}
    ),
    Case("ignored", {"batch": 4, "seq": 7, "vocab": 65}, {"ignore_index": IGNORED, "return_stats": True}),
    Case("indexed", {"batch": 4, "seq": 8, "vocab": 100}, {"row_indices": True, "return_stats": True}),
    Case("out", {"batch": 2, "seq": 6, "vocab": 77}, {"out": True}),
    Case("half-output", {"batch": 2, "seq": 6, "vocab": 77}, {"output_dtype": torch.bfloat16}),
    Case("inplace-backward", {"batch": 2, "seq": 5, "vocab": 130}, {"inplace_backward": True}),
    Case("online", {"batch": 1, "seq": 5, "vocab": 9001}, {"reduction": "online", "return_stats": True}),
    Case("two-pass", {"batch": 1, "seq": 5, "vocab": 9001}, {"reduction": "two_pass", "return_stats": True}),
    Case("peaked", {"batch": 1, "seq": 6, "vocab": 500}, {"scale": 12.0, "return_stats": True}),
    Case("beyond-exp", {"batch": 1, "seq": 6, "vocab": 300}, {"offset": 100.0, "return_stats": True}),
    Case("masked-vocabulary", {"batch": 1, "seq": 6, "vocab": 200}, {"minus_inf": 0.3, "return_stats": True}),
    Case("one-entry", {"batch": 1, "seq": 3, "vocab": 1}, {"return_stats": True}),
    Case("qwen3-vocabulary", {"batch": 1, "seq": 3, "vocab": 151936}, {"return_stats": True}, suite="full"),
    Case("gpt2-vocabulary", {"batch": 1, "seq": 4, "vocab": 50257}, {"return_stats": True}, suite="full"),
    Case("many-rows", {"batch": 4, "seq": 500, "vocab": 33}, suite="full"),
)
EMPTY = (Case("no-rows", {"batch": 0, "seq": 5, "vocab": 33}, {"return_stats": True}),)
DRAWN = frozenset({"scale", "offset", "minus_inf", "row_indices", "out", "temperature"})
"""Options that shape the inputs; the others are passed on as keyword arguments."""


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw ``logits[batch, seq, vocab]`` and ids, and what the case's options ask for."""
    batch, seq, vocab = (case.sizes[name] for name in ("batch", "seq", "vocab"))
    asked = case.options
    logits = draw.normal(batch, seq, vocab, scale=asked.get("scale", 2.0)) + asked.get("offset", 0.0)
    ids = draw.ids(vocab, batch, seq)
    if "minus_inf" in asked:
        hidden = draw.mask(asked["minus_inf"], batch, seq, vocab).scatter(-1, ids[..., None], False)
        logits = logits.masked_fill(hidden, -torch.inf)
    if "ignore_index" in asked:
        ids = ids.masked_fill(draw.mask(0.4, batch, seq), asked["ignore_index"])
    call: Inputs = {"logits": logits, "token_ids": ids}
    call |= {name: value for name, value in asked.items() if name not in DRAWN}
    if "temperature" in asked:
        per_token = asked["temperature"] == "tensor"
        call["temperature"] = (
            draw.uniform(0.5, 2.0, batch, seq, dtype=torch.float32) if per_token else asked["temperature"]
        )
    if asked.get("row_indices"):
        call["row_indices"] = draw.permutation(batch * seq)[: max(batch * seq // 2, 1)].to(draw.device)
    if asked.get("out"):
        call["out"] = torch.full((batch, seq), 7.0, device=draw.device)
    return call


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bound the terms: |z| and |lse| for the log-probability, p (1 + |z - lse|) for the entropy, and so on."""
    temperature = call.get("temperature", 1.0)
    scale = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    z = torch.where(call["logits"].isnan(), 0.0, call["logits"]) / scale
    finite = torch.where(z == -torch.inf, 0.0, z)
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp()
    top = finite.abs().amax(-1) + lse.abs()
    surprise = p * (finite.abs() + lse.abs()[..., None] + 1)
    terms = {"logp": 2 * top, "logsumexp": top, "entropy": surprise.sum(-1) + top}
    chosen = torch.nn.functional.one_hot(call["token_ids"].clamp(min=0).long(), z.shape[-1])
    grads = {"logp": (chosen + p) * (1 + top[..., None]), "logsumexp": p * (1 + top[..., None])}
    grads["entropy"] = surprise * (2 + top[..., None])
    dlogits = sum(grads[name] * value.abs()[..., None] for name, value in upstream.items()) / scale
    return {**terms, "gradient:logits": dlogits}


ROWS = RowLayout(
    arguments={"logits": 1, "token_ids": 0, "temperature": 0, "out": 0},
    results=frozenset({"logp", "logsumexp", "entropy", "gradient:logits"}),
    ids="token_ids",
)


def indexed(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Compute some rows only: those are the same bits, and the masked ones may hold NaN and ids out of range."""
    if {"row_indices", "out"} & call.keys():
        return
    count = call["token_ids"].numel()
    rows = draw.permutation(count)[: max(count // 2, 1)].to(draw.device)
    others = torch.ones(count, dtype=torch.bool, device=draw.device).index_fill(0, rows, False)
    others = others.view(call["token_ids"].shape)
    changed = {
        "logits": call["logits"].masked_fill(others[..., None], torch.nan),
        "token_ids": call["token_ids"].masked_fill(others, -7),
        "row_indices": rows,
    }

    def taken(name: str, result: torch.Tensor) -> torch.Tensor:
        return result.flatten(0, others.ndim - 1)[rows]

    yield Variant("half of the rows, by index", {**call, **changed}, taken, taken)


def number_as_tensor(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Give a temperature once as a number, once as a tensor of equal values."""
    if isinstance(call.get("temperature", 1.0), torch.Tensor):
        return
    value = torch.full(call["token_ids"].shape, call.get("temperature", 1.0), device=draw.device)
    yield Variant("temperature as a tensor", {**call, "temperature": value})


TRANSFORMS = {
    **ROWS.transforms(),
    "indexed": indexed,
    "temperature": number_as_tensor,
    "options": options(
        with_statistics={"return_stats": True},
        with_ignore_index={"ignore_index": IGNORED},
        unchecked={"validate": False},
    ),
}


SPEC = Spec(
    cases=CASES,
    inputs=inputs,
    references={"": reference.fused_logp},
    classes=dict.fromkeys(("logp", "logsumexp", "entropy", "gradient:logits"), "logprob"),
    differentiable=("logits",),
    magnitudes=magnitudes,
    transforms=TRANSFORMS,
    illegal=ILLEGAL,
    hygiene=ROWS.hygiene(),
    empty=EMPTY,
    writes={"out": "logp"},
    inplace={"inplace_backward": "logits"},
    unread=frozenset({"out", "reduction", "inplace_backward", "validate", "backend"}),
    output="logp",
    adds=frozenset({"return_stats"}),
    ids=("token_ids",),
    eager_only=frozenset({"inplace_backward"}),
)
