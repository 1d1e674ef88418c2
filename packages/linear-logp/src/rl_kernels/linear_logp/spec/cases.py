"""The cases of linear_logp: inputs and error budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from rl_kernels.core.constants import UNIT
from rl_kernels.core.testing import IGNORED, Case, Draw, Inputs, Spec
from rl_kernels.core.testing.dimensions import HELD
from rl_kernels.core.testing.magnitudes import of_log_softmax
from rl_kernels.linear_logp import reference
from rl_kernels.linear_logp.spec.cases_dimensions import DIMENSIONS, with_values
from rl_kernels.linear_logp.spec.illegal import ILLEGAL
from rl_kernels.linear_logp.spec.transforms import HYGIENE, TRANSFORMS, WEIGHTS

STATS = {"return_stats": True}
CAPPED = {**STATS, "bias": True, "softcap": 30.0}
PIECE = UNIT
"""Columns that a backend may process at once: ids and maxima are placed on both sides of its multiples."""
FEATURES = 16
"""A weight with fewer features than this is drawn at the scale of this many."""

_CASES = (
    Case("plain", {"batch": 2, "seq": 16, "hidden": 64, "vocab": 257}),
    Case("stats", {"batch": 2, "seq": 9, "hidden": 48, "vocab": 1000}, STATS),
    Case("bias", {"batch": 2, "seq": 7, "hidden": 32, "vocab": 131}, {**STATS, "bias": True}),
    Case("temperature", {"batch": 2, "seq": 5, "hidden": 40, "vocab": 333}, {**STATS, "temperature": 0.7}),
    Case(
        "temperature-per-token",
        {"batch": 3, "seq": 5, "hidden": 24, "vocab": 129},
        {**STATS, "temperature": "tensor", "bias": True},
    ),
    Case(
        "ignored", {"batch": 4, "seq": 7, "hidden": 32, "vocab": 65}, {**STATS, "ignore_index": IGNORED, "bias": True}
    ),
    Case(
        "segments",
        {"batch": 2, "seq": 9, "hidden": 17, "vocab": 9001},
        {**STATS, "bias": True, "edges": True, "workspace_mib": 1},
    ),
    # The last 952 columns are kept, in blocks of rows.
    Case(
        "kept",
        {"batch": 1, "seq": 130, "hidden": 8, "vocab": 3000},
        {**STATS, "saved_mib": 1, "workspace_mib": 1},
        relations=HELD,
    ),
    Case("few-rows", {"batch": 2, "seq": 16, "hidden": 24, "vocab": 1300}, {**STATS, "saved_mib": None, "bias": True}),
    Case(
        "tree",
        {"batch": 2, "seq": 9, "hidden": 17, "vocab": 9001},
        {**STATS, "bias": True, "vocab_segments": 8, "whole": True, "workspace_mib": 1},
    ),
    # Several chains over tokens, the last one short.
    Case("joined", {"batch": 3, "seq": 31, "hidden": 24, "vocab": 1300}, {**STATS, "bias": True, "join_tokens": 32}),
    Case(
        "joined-ignored",
        {"batch": 2, "seq": 40, "hidden": 16, "vocab": 33},
        {**STATS, "bias": True, "join_tokens": 16, "ignore_index": IGNORED, "scale": 0.25},
    ),
    # Blocks of 64 rows, which the chains cut.
    Case(
        "joined-blocks",
        {"batch": 1, "seq": 400, "hidden": 700, "vocab": 40},
        {"join_tokens": 144, "workspace_mib": 1, "scale": 0.25},
        relations=HELD,
    ),
    Case("odd", {"batch": 3, "seq": 3, "hidden": 33, "vocab": 1025}, {**STATS, "edges": True}),
    Case(
        "equal-rows",
        {"batch": 2, "seq": 6, "hidden": 24, "vocab": 130},
        {**STATS, "temperature": "tensor", "bias": True, "equal": True},
    ),
    Case("one-token", {"batch": 1, "seq": 1, "hidden": 64, "vocab": 515}, STATS),
    Case("one-feature", {"batch": 2, "seq": 9, "hidden": 1, "vocab": 7}, STATS),
    Case("pad-token", {"batch": 3, "seq": 7, "hidden": 20, "vocab": 50}, {**STATS, "ignore_index": 0, "bias": True}),
    Case("rising", {"batch": 1, "seq": 6, "hidden": 12, "vocab": 2 * PIECE + 1}, {**STATS, "bias": True, "low": PIECE}),
    Case(
        "masked-pieces",
        {"batch": 1, "seq": 6, "hidden": 12, "vocab": 2 * PIECE},
        {**STATS, "bias": True, "edges": True, "minus_inf_first": PIECE},
    ),
    Case("wide", {"batch": 1, "seq": 5, "hidden": 4100, "vocab": 11}, {**STATS, "scale": 0.5}),
    Case("blocks", {"batch": 2, "seq": 40, "hidden": 16, "vocab": 33}, {**STATS, "bias": True, "scale": 0.25}),
    Case(
        "many-tokens",
        {"batch": 2, "seq": 521, "hidden": 4, "vocab": 33},
        {**STATS, "bias": True, "temperature": "tensor"},
        grad=False,
    ),
    # LM heads as in Gemma 2, Granite and Cohere.
    Case("softcap", {"batch": 2, "seq": 7, "hidden": 48, "vocab": 300}, {**STATS, "softcap": 30.0, "scale": 8.0}),
    Case(
        "softcap-all",
        {"batch": 3, "seq": 5, "hidden": 24, "vocab": 1025},
        {**STATS, "softcap": 5.0, "logit_scale": 2.5, "temperature": "tensor", "bias": True, "ignore_index": IGNORED},
    ),
    Case(
        "softcap-small",
        {"batch": 1, "seq": 5, "hidden": 24, "vocab": 67},
        {**CAPPED, "softcap": 4.0, "logit_scale": 3.0, "temperature": 0.7},
    ),
    Case("softcap-masked", {"batch": 1, "seq": 6, "hidden": 32, "vocab": 200}, {**CAPPED, "minus_inf": 0.3}),
    Case("logit-scale", {"batch": 2, "seq": 7, "hidden": 64, "vocab": 257}, {**STATS, "logit_scale": 0.0625}),
    Case(
        "logit-scale-per-token",
        {"batch": 2, "seq": 7, "hidden": 33, "vocab": 129},
        {**STATS, "logit_scale": 0.125, "temperature": "tensor", "scale": 4.0},
    ),
    Case("one-entry", {"batch": 2, "seq": 8, "hidden": 24, "vocab": 1}, {**STATS, "bias": True}),
    Case("beyond-exp", {"batch": 1, "seq": 6, "hidden": 16, "vocab": 300}, {**STATS, "bias": True, "offset": 100.0}),
    Case("peaked", {"batch": 1, "seq": 6, "hidden": 64, "vocab": 500}, {**STATS, "scale": 8.0}),
    Case(
        "masked-vocabulary",
        {"batch": 1, "seq": 6, "hidden": 32, "vocab": 200},
        {**STATS, "bias": True, "minus_inf": 0.3},
    ),
    Case(
        "qwen3-vocabulary", {"batch": 1, "seq": 3, "hidden": 16, "vocab": 151936}, {**STATS, "scale": 2.0}, suite="full"
    ),
    Case("gpt2-vocabulary", {"batch": 1, "seq": 4, "hidden": 24, "vocab": 50257}, STATS, suite="full"),
    Case("llama3-hidden", {"batch": 1, "seq": 3, "hidden": 4096, "vocab": 300}, STATS, suite="full"),
    Case(
        "many-rows",
        {"batch": 4, "seq": 500, "hidden": 16, "vocab": 33},
        {"workspace_mib": 1, "scale": 0.125},
        suite="full",
    ),
    *DIMENSIONS,
)
# Few rows keep their logits by default, and then the path of many rows would not be checked.
CASES = tuple(replace(case, options={"saved_mib": 0, **case.options}) for case in _CASES)
EMPTY = (Case("no-rows", {"batch": 0, "seq": 5, "hidden": 16, "vocab": 33}, {**STATS, "bias": True}),)
KNOWN = ("return_known", "known", "check_rows")
"""Arguments that need two calls, one after the other."""
TEMPERATURES = {"tensor": (0.5, 2.0), "cold": (0.001, 0.003)}
"""Range of per-token temperatures, by option value."""
DRAWN = frozenset(
    {
        "whole",
        "scale",
        "offset",
        "minus_inf",
        "minus_inf_first",
        "low",
        "edges",
        "equal",
        "bias",
        "temperature",
        "values",
        "ids",
    }
)
"""Options that shape the inputs; all others become keyword arguments of the call."""


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw ``hidden[batch, seq, hidden]``, a weight of scale at most ``hidden^-0.5``, ids, and the options' tensors."""
    batch, seq, size, vocab = (case.sizes[name] for name in ("batch", "seq", "hidden", "vocab"))
    asked = case.options
    ids = draw.ids(vocab, batch, seq)
    if asked.get("edges"):
        ids = with_edges(ids, vocab)
    call: Inputs = {
        "hidden": with_values(draw.normal(batch, seq, size, scale=_scale(case)), asked.get("values")),
        # With few features a single large weight would dominate the logits and the gradient of hidden.
        "lm_head_weight": draw.normal(vocab, size, scale=max(size, FEATURES) ** -0.5),
        "target_ids": ids,
    }
    if asked.get("equal"):
        call["hidden"], ids = call["hidden"][:1, :1].repeat(batch, seq, 1), ids[:1, :1].repeat(batch, seq)
        call["target_ids"] = ids
    if asked.get("bias"):
        bias = draw.normal(vocab) + asked.get("offset", 0.0)
        if "minus_inf" in asked:
            targets = torch.zeros(vocab, dtype=torch.bool, device=draw.device).index_fill(0, ids.flatten(), True)
            bias = bias.masked_fill(draw.mask(asked["minus_inf"], vocab) & ~targets, -torch.inf)
        # Far below the other pieces: exp(other - this) overflows and exp(this - other) is 0. The last columns keep
        # their value, because lowering all columns would only shift the row.
        bias[: min(asked.get("low", 0), vocab // 2)] -= 110
        bias[: min(asked.get("minus_inf_first", 0), vocab - 1)] = -torch.inf
        call["bias"] = bias
    if "ignore_index" in asked:
        call["target_ids"] = ids.masked_fill(draw.mask(0.4, batch, seq), asked["ignore_index"])
    if "temperature" in asked:
        between = TEMPERATURES.get(asked["temperature"])
        call["temperature"] = (
            draw.uniform(*between, batch, seq, dtype=torch.float32) if between else asked["temperature"]
        )
    if asked.get("whole"):
        call |= {"vocab_start": 0, "vocab_size": vocab}
    call["target_ids"] = call["target_ids"].to(asked.get("ids", torch.int64))
    return call | {name: value for name, value in asked.items() if name not in DRAWN}


def _scale(case: Case) -> float:
    """Return the standard deviation of hidden: that of the case, or less if there are many tokens per vocabulary entry.

    The tolerance has an absolute bound, and a row of the weight's gradient sums one large term for each token that
    selects that entry.
    """
    tokens = case.sizes["batch"] * case.sizes["seq"]
    return min(case.options.get("scale", 1.0), math.sqrt(case.sizes["vocab"] / max(tokens, 1)))


def with_edges(ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the ids with the leading ones set to the first and last columns of the pieces."""
    edges = [column for start in range(0, vocab, PIECE) for column in (start, min(start + PIECE, vocab) - 1)]
    found = ids.clone()
    found.view(-1)[: len(edges)] = torch.tensor(edges, device=ids.device)[: ids.numel()]
    return found


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the magnitudes of the terms: sum |hidden| |W| + |bias| for logits, and the gradients through them."""
    ids, hidden, weight = call["target_ids"], call["hidden"], call["lm_head_weight"].abs()
    active = (ids != call["ignore_index"]).double() if "ignore_index" in call else torch.ones_like(ids).double()
    temperature = call.get("temperature", 1.0)
    scale = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    bias = call.get("bias", hidden.new_zeros(()))
    z, size, slope = _capped(
        call,
        hidden @ call["lm_head_weight"].T + bias,
        hidden.abs() @ weight.T + torch.where(bias == -torch.inf, 0.0, bias.abs()),
    )
    z, size = z / scale, size / scale
    taken = {name: value.abs() * active for name, value in upstream.items()}
    terms, dz = of_log_softmax(z, size, ids % z.shape[-1], taken, size if call.get("return_stats") else None)
    dlogits = dz / scale * slope
    rows = dlogits.flatten(0, -2)
    dweight = rows.T @ hidden.abs().flatten(0, -2)
    gradients = {"hidden": dlogits @ weight, "lm_head_weight": dweight, "bias": rows.sum(0)}
    return {**terms, **{f"gradient:{name}": value for name, value in gradients.items()}}


def _capped(
    call: Inputs, x: torch.Tensor, size: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """Return the scaled and capped logits, the magnitudes of their terms, and of the factor of their gradient."""
    logit_scale, softcap = call.get("logit_scale", 1.0), call.get("softcap", 0.0)
    x, size = x * logit_scale, size * logit_scale
    if not softcap:
        return x, size, logit_scale
    t = (x / softcap).tanh()
    slope = 1 - t.square()
    # 1 - t^2 cancels, and t carries the rounding error of its logit.
    of_slope = slope * (1 + 2 * t.abs() * size / softcap) + 2 * t.square()
    return softcap * t, slope * size + 2 * softcap * t.abs(), logit_scale * of_slope


SPEC = Spec(
    cases=CASES,
    inputs=inputs,
    references={"": reference.linear_logp},
    classes={
        **dict.fromkeys(("logp", "logsumexp", "entropy", "gradient:hidden"), "logprob"),
        **dict.fromkeys(WEIGHTS, "reduction"),
    },
    differentiable=("hidden", "lm_head_weight", "bias"),
    magnitudes=magnitudes,
    transforms=TRANSFORMS,
    illegal=ILLEGAL,
    hygiene=HYGIENE,
    empty=EMPTY,
    uncased=frozenset({*KNOWN, "validate", "backend", "process_group"}),
    unread=frozenset(
        {
            *KNOWN,
            "workspace_mib",
            "saved_mib",
            "join_tokens",
            "process_group",
            "vocab_start",
            "vocab_size",
            "vocab_segments",
            "validate",
            "backend",
        }
    ),
    output="logp",
    spared=frozenset({"return_stats", "saved_mib", "workspace_mib"}),
    ids=("target_ids",),
    main_grad=frozenset({"lm_head_weight"}),
    autocast={"": ("hidden", "lm_head_weight", "bias")},
)
