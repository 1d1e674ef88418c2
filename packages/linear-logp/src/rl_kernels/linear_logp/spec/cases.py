"""The cases of linear_logp: inputs and error budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from rl_kernels.core.constants import UNIT
from rl_kernels.core.testing import IGNORED, Case, Draw, Inputs, Spec
from rl_kernels.lab.dimensions import CHECKED
from rl_kernels.lab.magnitudes import of_log_softmax
from rl_kernels.lab.thresholds import in_gaps
from rl_kernels.linear_logp import reference
from rl_kernels.linear_logp.arguments import Memory
from rl_kernels.linear_logp.spec.cases_dimensions import DIMENSIONS, with_values
from rl_kernels.linear_logp.spec.illegal import ILLEGAL
from rl_kernels.linear_logp.spec.transforms import HYGIENE, TRANSFORMS, WEIGHTS

STATS = {"return_stats": True}
BIASED = {**STATS, "bias": True}
EACH = {**BIASED, "temperature": "tensor"}
PIECE = UNIT
"""Columns that a backend may process at once: ids and maxima are placed on both sides of its multiples."""
FEATURES = 16
"""A weight with fewer features than this is drawn at the scale of this many."""


def _case(name: str, sizes: tuple[int, int, int, int], options: Mapping[str, Any] = STATS, **kind: Any) -> Case:
    """Return a case of (batch, seq, hidden, vocab)."""
    return Case(name, dict(zip(("batch", "seq", "hidden", "vocab"), sizes, strict=True)), options, **kind)


_CASES = (
    _case("plain", (2, 16, 64, 257), {}),
    _case("stats", (2, 9, 48, 1000)),
    _case("bias", (2, 7, 32, 131), BIASED),
    _case("temperature", (2, 5, 40, 333), {**STATS, "temperature": 0.7}),
    _case("temperature-per-token", (3, 5, 24, 129), EACH),
    _case("min-logit", (3, 5, 24, 1030), {**EACH, "min_logit": True}),
    _case("kept-ids", (3, 5, 24, 1030), {**EACH, "kept_ids": 40, "scale": 0.25}),
    _case("kept-ids-ignored", (4, 7, 32, 65), {**BIASED, "kept_ids": 9, "ignore_index": IGNORED, "softcap": 4.0}),
    _case("ignored", (4, 7, 32, 65), {**BIASED, "ignore_index": IGNORED}),
    _case("segments", (2, 9, 17, 4200), {**BIASED, "edges": True, "workspace_mib": 1}),
    # The last 952 columns are kept, in blocks of rows.
    _case("kept", (1, 130, 8, 3000), {**STATS, "saved_mib": 1, "workspace_mib": 1}, relations=CHECKED),
    _case("few-rows", (2, 16, 24, 1300), {**BIASED, "saved_mib": None}),
    _case("tree", (2, 9, 17, 9001), {**BIASED, "vocab_segments": 8, "whole": True, "workspace_mib": 1}),
    # Several chains over tokens, the last one short.
    _case("joined", (3, 31, 24, 1300), {**BIASED, "join_tokens": 32}),
    _case("joined-ignored", (2, 40, 16, 33), {**BIASED, "join_tokens": 16, "ignore_index": IGNORED, "scale": 0.25}),
    # Blocks of 64 rows, which the chains cut.
    _case(
        "joined-blocks", (1, 400, 700, 40), {"join_tokens": 144, "workspace_mib": 1, "scale": 0.25}, relations=CHECKED
    ),
    _case("odd", (3, 3, 33, 1025), {**STATS, "edges": True}),
    _case("equal-rows", (2, 6, 24, 130), {**EACH, "equal": True}),
    _case("one-token", (1, 1, 64, 515)),
    _case("one-feature", (2, 9, 1, 7)),
    _case("pad-token", (3, 7, 20, 50), {**BIASED, "ignore_index": 0}),
    _case("rising", (1, 6, 12, 2 * PIECE + 1), {**BIASED, "low": PIECE}),
    _case("masked-pieces", (1, 6, 12, 2 * PIECE), {**BIASED, "edges": True, "minus_inf_first": PIECE}),
    _case("wide", (1, 5, 4100, 11), {**STATS, "scale": 0.5}),
    _case("blocks", (2, 40, 16, 33), {**BIASED, "scale": 0.25}),
    _case("many-tokens", (2, 521, 4, 33), EACH, grad=False),
    # LM heads as in Gemma 2, Granite and Cohere.
    _case("softcap", (2, 7, 48, 300), {**STATS, "softcap": 30.0, "scale": 8.0}),
    _case("softcap-all", (3, 5, 24, 1025), {**EACH, "softcap": 5.0, "logit_scale": 2.5, "ignore_index": IGNORED}),
    _case("softcap-small", (1, 5, 24, 67), {**BIASED, "softcap": 0.75, "logit_scale": 3.0, "temperature": 0.7}),
    _case("softcap-masked", (1, 6, 32, 200), {**BIASED, "softcap": 30.0, "minus_inf": 0.3}),
    _case("logit-scale", (2, 7, 64, 257), {**STATS, "logit_scale": 0.0625}),
    _case(
        "logit-scale-per-token",
        (2, 7, 33, 129),
        {**STATS, "logit_scale": 0.125, "temperature": "tensor", "scale": 4.0},
    ),
    _case("one-entry", (2, 8, 24, 1), BIASED),
    _case("beyond-exp", (1, 6, 16, 300), {**BIASED, "offset": 100.0}),
    _case("peaked", (1, 6, 64, 500), {**STATS, "scale": 8.0}),
    _case("masked-vocabulary", (1, 6, 32, 200), {**BIASED, "minus_inf": 0.3}),
    _case("qwen3-vocabulary", (1, 3, 16, 151936), {**STATS, "scale": 2.0}, suite="full"),
    _case("gpt2-vocabulary", (1, 4, 24, 50257), suite="full"),
    _case("llama3-hidden", (1, 3, 4096, 300), suite="full"),
    _case("many-rows", (4, 500, 16, 33), {"workspace_mib": 1, "scale": 0.125}, suite="full"),
    *DIMENSIONS,
)
# Few rows keep their logits by default, and then the path of many rows would not be checked.
CASES = tuple(replace(case, options={"saved_mib": 0, **case.options}) for case in _CASES)
EMPTY = (_case("no-rows", (0, 5, 16, 33), BIASED),)
SHARD = ("process_group", "vocab_size", "vocab_segments")
TEMPERATURES = {"tensor": (0.5, 2.0), "cold": (0.001, 0.003)}
"""Range of per-token temperatures, by option value."""
FLOATS = ("hidden", "lm_head_weight", "bias", "temperature")
DRAWN = frozenset(
    {
        *("whole", "scale", "offset", "minus_inf", "minus_inf_first", "low", "edges", "equal"),
        *("bias", "temperature", "min_logit", "kept_ids", "values", "ids"),
    }
)
"""Options that shape the inputs; all others become keyword arguments of the call."""


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw ``hidden[batch, seq, hidden]``, a weight of scale at most ``hidden^-0.5``, ids, and the options' tensors."""
    batch, seq, size, vocab = (case.sizes[name] for name in ("batch", "seq", "hidden", "vocab"))
    options = case.options
    ids = draw.ids(vocab, batch, seq)
    if options.get("edges"):
        ids = with_edges(ids, vocab)
    call: Inputs = {
        "hidden": with_values(draw.normal(batch, seq, size, scale=_scale(case)), options.get("values")),
        # With few features a single large weight would dominate the logits and the gradient of hidden.
        "lm_head_weight": draw.normal(vocab, size, scale=max(size, FEATURES) ** -0.5),
        "target_ids": ids,
    }
    if options.get("equal"):
        call["hidden"], ids = call["hidden"][:1, :1].repeat(batch, seq, 1), ids[:1, :1].repeat(batch, seq)
        call["target_ids"] = ids
    if options.get("bias"):
        bias = draw.normal(vocab) + options.get("offset", 0.0)
        if "minus_inf" in options:
            targets = torch.zeros(vocab, dtype=torch.bool, device=draw.device).index_fill(0, ids.flatten(), True)
            bias = bias.masked_fill(draw.mask(options["minus_inf"], vocab) & ~targets, -torch.inf)
        # Far below the other pieces: exp(other - this) overflows and exp(this - other) is 0. The last columns keep
        # their value, because lowering all columns would only shift the row.
        bias[: min(options.get("low", 0), vocab // 2)] -= 110
        bias[: min(options.get("minus_inf_first", 0), vocab - 1)] = -torch.inf
        call["bias"] = bias
    if "ignore_index" in options:
        call["target_ids"] = ids.masked_fill(draw.mask(0.4, batch, seq), options["ignore_index"])
    if "temperature" in options:
        between = TEMPERATURES.get(options["temperature"])
        call["temperature"] = (
            draw.uniform(*between, batch, seq, dtype=torch.float32) if between else options["temperature"]
        )
    if options.get("whole"):
        call["vocab_size"] = vocab
    call["target_ids"] = call["target_ids"].to(options.get("ids", torch.int64))
    if options.get("min_logit"):
        # Not checked: some targets are below it, and rows beside these have others.
        wide = {name: call[name].double() for name in FLOATS if isinstance(call.get(name), torch.Tensor)}
        call |= {"min_logit": in_gaps(_terms({**options, **call, **wide})[0], draw), "validate": False}
    if options.get("kept_ids"):
        call |= {"kept_ids": kept_ids(call["target_ids"], options["kept_ids"], vocab, draw), "validate": False}
    return call | {name: value for name, value in options.items() if name not in DRAWN}


def kept_ids(target_ids: torch.Tensor, most: int, vocab: int, draw: Draw) -> torch.Tensor:
    """Return ids ``[..., most]`` in any order, some twice, some -1; those of half of the rows have the target."""
    kept = draw.ids(vocab, *target_ids.shape, most).masked_fill(draw.mask(0.3, *target_ids.shape, most), -1)
    kept[..., 1] = kept[..., 0]
    kept[..., 2] = torch.where(draw.mask(0.5, *target_ids.shape), target_ids.clamp(min=0).long(), kept[..., 2])
    return kept


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
    with_edge_ids = ids.clone()
    with_edge_ids.view(-1)[: len(edges)] = torch.tensor(edges, device=ids.device)[: ids.numel()]
    return with_edge_ids


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the magnitudes of the terms: sum |hidden| |W| + |bias| for logits, and the gradients through them."""
    ids, hidden, weight = call["target_ids"], call["hidden"], call["lm_head_weight"].abs()
    z, size, factor = _terms(call)
    if "min_logit" in call:
        is_below = z < call["min_logit"][..., None]
        z, size = z.masked_fill(is_below, -torch.inf), size.masked_fill(is_below, 0.0)
    if "kept_ids" in call:
        columns = call["kept_ids"].masked_fill(call["kept_ids"] < 0, z.shape[-1])
        is_out = torch.ones_like(F.pad(z, [0, 1]), dtype=torch.bool).scatter(-1, columns, False)[..., :-1]
        z, size = z.masked_fill(is_out, -torch.inf), size.masked_fill(is_out, 0.0)
    active = (ids != call["ignore_index"]).double() if "ignore_index" in call else torch.ones_like(ids).double()
    taken = {name: value.abs() * active for name, value in upstream.items()}
    terms, dz = of_log_softmax(z, size, ids % z.shape[-1], taken, size if call.get("return_stats") else None)
    dlogits = dz * factor
    rows = dlogits.flatten(0, -2)
    dweight = rows.T @ hidden.abs().flatten(0, -2)
    gradients = {"hidden": dlogits @ weight, "lm_head_weight": dweight, "bias": rows.sum(0)}
    return {**terms, **{f"gradient:{name}": value for name, value in gradients.items()}}


def _terms(call: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """Return the logits after the temperature, the magnitudes of their terms, and of the factor of their gradient."""
    temperature, hidden, weight = call.get("temperature", 1.0), call["hidden"], call["lm_head_weight"]
    scale = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    bias = call.get("bias", hidden.new_zeros(()))
    size = hidden.abs() @ weight.abs().T + torch.where(bias == -torch.inf, 0.0, bias.abs())
    z, size, slope = _capped(call, hidden @ weight.T + bias, size)
    return z / scale, size / scale, slope / scale


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
    uncased=frozenset({"validate", "backend", "process_group"}),
    unread=frozenset({*SHARD, "workspace_mib", "saved_mib", "join_tokens", "validate", "backend"}),
    output="logp",
    groups={"memory": Memory},
    spared=frozenset({"return_stats", "saved_mib", "workspace_mib"}),
    ids=("target_ids",),
    main_grad=frozenset({"lm_head_weight"}),
    autocast={"": ("hidden", "lm_head_weight", "bias")},
)
