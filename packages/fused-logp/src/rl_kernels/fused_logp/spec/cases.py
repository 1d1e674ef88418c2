"""The cases of fused_logp: inputs and error budget."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_kernels.core.testing import IGNORED, Case, Draw, Inputs, Spec
from rl_kernels.fused_logp import reference
from rl_kernels.fused_logp.spec.cases_dimensions import DIMENSIONS, with_values
from rl_kernels.fused_logp.spec.illegal import ILLEGAL
from rl_kernels.fused_logp.spec.transforms import HYGIENE, TRANSFORMS
from rl_kernels.lab.magnitudes import of_log_softmax
from rl_kernels.lab.thresholds import in_gaps

STATS = {"return_stats": True}
LOWEST = {**STATS, "minus_inf": 0.3, "finite": True}
TWICE = {"row_indices": "twice", "inplace_backward": True}
SEGMENT = 4096
"""Columns that a backend may process at once: ids and maxima are placed on both sides of its multiples."""
SPREAD = 64
"""Number of columns from which on one entry is unlikely to have most of the probability."""

CASES = (
    Case("plain", {"batch": 2, "seq": 16, "vocab": 257}),
    Case("stats", {"batch": 2, "seq": 9, "vocab": 1000}, STATS),
    Case("temperature", {"batch": 2, "seq": 5, "vocab": 333}, {**STATS, "temperature": 0.7}),
    Case("temperature-per-token", {"batch": 3, "seq": 5, "vocab": 129}, {**STATS, "temperature": "tensor"}),
    Case("min-logit", {"batch": 3, "seq": 5, "vocab": 1030}, {**STATS, "min_logit": True, "temperature": "tensor"}),
    Case("equal-rows", {"batch": 2, "seq": 6, "vocab": 130}, {**STATS, "temperature": "tensor", "equal": True}),
    Case("ignored", {"batch": 4, "seq": 7, "vocab": 65}, {**STATS, "ignore_index": IGNORED}),
    Case("indexed", {"batch": 4, "seq": 8, "vocab": 100}, {**STATS, "row_indices": True}),
    Case("out", {"batch": 2, "seq": 6, "vocab": 77}, {"out": True}),
    Case("half-output", {"batch": 2, "seq": 6, "vocab": 77}, {"out_dtype": torch.bfloat16}),
    Case("inplace-backward", {"batch": 2, "seq": 5, "vocab": 130}, {"inplace_backward": True}),
    Case("peaked", {"batch": 1, "seq": 6, "vocab": 500}, {**STATS, "scale": 8.0}),
    Case("beyond-exp", {"batch": 1, "seq": 6, "vocab": 300}, {**STATS, "offset": 100.0}),
    Case("masked-vocabulary", {"batch": 1, "seq": 6, "vocab": 200}, {**STATS, "minus_inf": 0.3}),
    Case("masked-by-lowest", {"batch": 1, "seq": 6, "vocab": 200}, {**LOWEST, "temperature": 0.7}),
    Case("pad-token", {"batch": 3, "seq": 7, "vocab": 50}, {**STATS, "ignore_index": 0}),
    Case("rising", {"batch": 1, "seq": 6, "vocab": 2 * SEGMENT + 1}, {**STATS, "low": SEGMENT}),
    Case("masked-segments", {"batch": 1, "seq": 6, "vocab": 2 * SEGMENT}, {**STATS, "hidden": SEGMENT}),
    Case("indexed-inplace", {"batch": 3, "seq": 14, "vocab": 2 * SEGMENT + 1}, TWICE),
    Case("no-distribution", {"batch": 1, "seq": 6, "vocab": 40}, {**STATS, "specials": True}),
    Case("one-entry", {"batch": 1, "seq": 3, "vocab": 1}, STATS),
    Case("qwen3-vocabulary", {"batch": 1, "seq": 3, "vocab": 151936}, STATS, suite="full"),
    Case("gpt2-vocabulary", {"batch": 1, "seq": 4, "vocab": 50257}, STATS, suite="full"),
    Case("many-rows", {"batch": 4, "seq": 500, "vocab": 33}, suite="full"),
    *DIMENSIONS,
)
EMPTY = (Case("no-rows", {"batch": 0, "seq": 5, "vocab": 33}, STATS),)
TEMPERATURES = {"tensor": (0.5, 2.0), "cold": (0.001, 0.003)}
"""Range of per-token temperatures, by option value."""
DRAWN = frozenset(
    {
        *("scale", "offset", "minus_inf", "low", "hidden", "edges", "equal", "finite", "specials", "row_indices"),
        *("out", "temperature", "min_logit", "values", "ids"),
    }
)
"""Options that shape the inputs; all others become keyword arguments of the call."""


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw ``logits[batch, seq, vocab]``, ids, and what the options of the case need."""
    batch, seq, vocab = (case.sizes[name] for name in ("batch", "seq", "vocab"))
    options = case.options
    # Rounding an FP32 logsumexp of 100 changes p by 4e-6 of p: within the absolute tolerance only if p is small.
    offset = options.get("offset", 0.0) if vocab >= SPREAD else 0.0
    logits = with_values(
        draw.normal(batch, seq, vocab, scale=options.get("scale", 2.0)) + offset, options.get("values")
    )
    ids = draw.ids(vocab, batch, seq)
    if "minus_inf" in options or options.get("values") == "minus_inf":
        hidden = draw.mask(options.get("minus_inf", 0.3), batch, seq, vocab).scatter(-1, ids[..., None], False)
        logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min if options.get("finite") else -torch.inf)
    if options.get("specials"):
        put_specials(logits.view(-1, vocab))
    if {"low", "hidden", "edges"} & options.keys():
        ids = with_edges(ids, vocab, 1024 if "edges" in options else SEGMENT)
    if {"low", "hidden"} & options.keys():
        # Far below the other segments: exp(other - this) overflows and exp(this - other) is 0. The last columns keep
        # their value, because lowering all columns would only shift the row.
        logits[..., : min(options.get("low", 0), vocab // 2)] -= 110
        logits[..., : min(options.get("hidden", 0), vocab - 1)] = -torch.inf
        logits[..., -1] += 3
    if options.get("equal"):
        logits, ids = logits[:1, :1].repeat(batch, seq, 1), ids[:1, :1].repeat(batch, seq)
    if "ignore_index" in options:
        ids = ids.masked_fill(draw.mask(0.4, batch, seq), options["ignore_index"])
    call: Inputs = {"logits": logits, "target_ids": ids.to(options.get("ids", torch.int64))}
    call |= {name: value for name, value in options.items() if name not in DRAWN}
    if draw.dtype == torch.float64:
        call["out_dtype"] = torch.float64
    if "temperature" in options:
        between = TEMPERATURES.get(options["temperature"])
        call["temperature"] = (
            draw.uniform(*between, batch, seq, dtype=torch.float32) if between else options["temperature"]
        )
    if options.get("row_indices"):
        rows = draw.permutation(batch * seq)[: max(batch * seq // 2, 1)].to(draw.device)
        call["row_indices"] = rows.repeat(2) if options["row_indices"] == "twice" else rows
    if options.get("min_logit"):
        # Not checked: some targets are below it, and rows beside these have others.
        call |= {"min_logit": in_gaps(_z(call), draw), "validate": False}
    if options.get("out"):
        call["out"] = torch.full((batch, seq), 7.0, device=draw.device, dtype=call.get("out_dtype", torch.float32))
    return call


def _z(call: Inputs) -> torch.Tensor:
    """Return the logits in FP64, after the temperature."""
    temperature = call.get("temperature", 1.0)
    scale = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    z: torch.Tensor = call["logits"].double() / scale
    return z


def put_specials(logits: torch.Tensor) -> None:
    """Make rows of ``[N, V]`` that are no distribution: all -inf, a NaN, an inf; with few rows, a row gets several."""
    rows, vocab = logits.shape
    logits[0] = -torch.inf
    logits[2 % rows, 3 % vocab] = torch.nan
    logits[4 % rows, -1] = torch.inf


def with_edges(ids: torch.Tensor, vocab: int, width: int) -> torch.Tensor:
    """Return the ids with the leading ones set to the first and last columns of the segments."""
    edges = [column for start in range(0, vocab, width) for column in (start, min(start + width, vocab) - 1)]
    edge_ids = ids.clone()
    edge_ids.view(-1)[: len(edges)] = torch.tensor(edges, device=ids.device)[: ids.numel()]
    return edge_ids


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the magnitudes of the terms of each result; a logit has no rounding error without a temperature."""
    temperature = call.get("temperature", 1.0)
    scale = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    z = torch.where(call["logits"].isnan(), 0.0, call["logits"]) / scale
    if "min_logit" in call:
        z = z.masked_fill(z < call["min_logit"][..., None], -torch.inf)
    size = torch.where(z == -torch.inf, 0.0, z).abs()
    rounded = (size if "temperature" in call else torch.zeros_like(size)) if call.get("return_stats") else None
    upstream_sizes = {name: value.abs() for name, value in upstream.items()}
    terms, dz = of_log_softmax(z, size, call["target_ids"] % z.shape[-1], upstream_sizes, rounded)
    return {**terms, "gradient:logits": dz / scale}


SPEC = Spec(
    cases=CASES,
    inputs=inputs,
    references={"": reference.fused_logp},
    classes=dict.fromkeys(("logp", "logsumexp", "entropy", "gradient:logits"), "logprob"),
    differentiable=("logits",),
    magnitudes=magnitudes,
    transforms=TRANSFORMS,
    illegal=ILLEGAL,
    hygiene=HYGIENE,
    empty=EMPTY,
    writes={"out": "logp"},
    inplace={"inplace_backward": "logits"},
    unread=frozenset({"out", "inplace_backward", "validate", "backend"}),
    output="logp",
    spared=frozenset({"return_stats"}),
    ids=("target_ids",),
    indexed="row_indices",
    eager_only=frozenset({"inplace_backward"}),
)
