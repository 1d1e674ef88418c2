"""The cases of experts: inputs, promised layouts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.testing import Case, Draw, Inputs, Spec, Variant
from rl_kernels.lab.check.rows import RowLayout
from rl_kernels.lab.check.transforms import as_int32, one_nan, options
from rl_kernels.moe import reference
from rl_kernels.moe.spec.cases_dimensions import DIMENSIONS, sizes
from rl_kernels.moe.spec.deviations import deviations
from rl_kernels.moe.spec.illegal import ILLEGAL
from rl_kernels.moe.spec.magnitudes import magnitudes

BIASES = {"biases": True}
GPT_OSS = {**BIASES, "activation": "clamped_swiglu", "interleaved": True, "transposed": True}
WITHOUT_GRADIENTS = ("accuracy", "repeatability", "invariance", "hygiene")
"""Relations of cases whose gradients the pairs of options check."""
CASES = (
    Case("plain", sizes(7, 24, 20, 5, 2)),
    Case("odd", sizes(7, 13, 9, 3, 2)),
    Case("shared", sizes(5, 16, 12, 4, 2), {"shared": True}),
    Case("biases", sizes(5, 16, 12, 4, 2), BIASES),
    Case("gelu", sizes(5, 16, 12, 4, 2), {"activation": "gelu_tanh"}, relations=WITHOUT_GRADIENTS),
    Case("clamped", sizes(5, 16, 12, 4, 2), {"activation": "clamped_swiglu", "scale": 4.0}),
    Case("interleaved", sizes(5, 16, 12, 4, 2), {"interleaved": True}, relations=WITHOUT_GRADIENTS),
    Case("transposed", sizes(5, 16, 12, 4, 2), {"transposed": True}, relations=WITHOUT_GRADIENTS),
    Case("gpt-oss", sizes(5, 24, 24, 4, 4), GPT_OSS),
    Case("recomputed", sizes(5, 16, 12, 4, 2), {**BIASES, "recompute": True}),
    Case("one-token", sizes(1, 24, 20, 8, 4)),
    Case("one-expert", sizes(19, 24, 20, 1, 1)),
    Case("one-term", sizes(5, 16, 1, 4, 2), relations=("accuracy",)),
    Case("all-on-one", sizes(19, 16, 12, 5, 2), {"chosen": "first"}),
    Case("twice-the-same", sizes(5, 16, 12, 4, 3), {"chosen": "repeated"}),
    Case("not-here", sizes(5, 16, 12, 4, 3), {"chosen": "absent", "shared": True}),
    Case("weights-of-16-bits", sizes(5, 16, 12, 4, 2), {"weights": torch.bfloat16}),
    Case("many-experts", sizes(19, 16, 8, 64, 8), {"shared": True}, suite="full"),
    Case("qwen3-30b-a3b", sizes(5, 2048, 768, 8, 2), {}, suite="full", relations=("accuracy",)),
    *DIMENSIONS,
)

EMPTY = (
    Case("no-tokens", sizes(0, 16, 12, 4, 2)),
    Case("no-tokens-biases", sizes(0, 16, 12, 4, 2), {**BIASES, "shared": True}),
)
OPTIONS = {"activation", "interleaved", "transposed", "recompute"}


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw the operands: weights have standard deviation ``K^-0.5``, those of routes a mean of about ``0.5 / k``."""
    tokens, width, inner, count, slots = (case.sizes[name] for name in sizes(0, 0, 0, 0, 0))
    chosen = case.options.get("chosen", "")
    scale = case.options.get("scale", 1.0)
    gate_up = draw.normal(count, 2 * inner, width, scale=width**-0.5 * scale)
    down = draw.normal(count, width, inner, scale=inner**-0.5 / scale)
    if case.options.get("transposed"):
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    weights = draw.uniform(0.05 / slots, 1 / slots, tokens, slots, dtype=case.options.get("weights", torch.float32))
    call = {"hidden": draw.normal(tokens, width), "gate_up": gate_up, "down": down}
    call |= {"ids": choose(draw, tokens, count, slots, chosen), "weights": weights}
    if "biases" in case.options:
        call |= {"gate_up_bias": draw.normal(count, 2 * inner), "down_bias": draw.normal(count, width)}
    if "shared" in case.options:
        call["shared"] = draw.normal(tokens, width)
    return call | {name: value for name, value in case.options.items() if name in OPTIONS}


def choose(draw: Draw, tokens: int, count: int, slots: int, chosen: str) -> torch.Tensor:
    """Return ids: k different experts a token in drawn order; the first one, for all or half; equal or absent ones."""
    drawn = [draw.permutation(max(count, slots))[:slots] % count for _ in range(tokens)]
    ids = torch.stack(drawn) if drawn else draw.permutation(1)[:0].reshape(0, slots)
    if chosen == "first":
        ids[:, 0] = 0
    elif chosen == "half":
        # Whoever has it in another slot swaps the two.
        ids[::2] = torch.where(ids[::2] == 0, ids[::2, :1], ids[::2])
        ids[::2, 0] = 0
    elif chosen == "repeated":
        ids[:, -1] = ids[:, 0]
    elif chosen == "absent":
        ids[::2, -1], ids[3:4] = count, count
    return ids.to(draw.device)


def bad_ids(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Yield calls with unchecked ids out of range in the first and the last token, whose output is then NaN."""
    tokens, count = len(call["ids"]), call["gate_up"].shape[0]
    bad = torch.zeros(tokens, dtype=torch.bool, device=draw.device)
    bad[[0, -1]] = True

    def with_nan(name: str, result: torch.Tensor) -> torch.Tensor | None:
        if name not in ("output", "gradient:hidden"):
            return None
        return one_nan(name, result.masked_fill(bad[:, None], torch.nan))

    for value in (count + 1, -1, 2**30):
        ids = call["ids"].clone()
        ids[bad, -1] = value
        yield Variant(f"id {value}", {**call, "ids": ids, "validate": False}, with_nan, one_nan)


ROWS = RowLayout(
    arguments={"hidden": 1, "ids": 1, "weights": 1, "shared": 1},
    results=frozenset({"output", "gradient:hidden", "gradient:weights", "gradient:shared"}),
    any_leading=False,
)
DIFFERENTIABLE = ("hidden", "gate_up", "down", "weights", "gate_up_bias", "down_bias", "shared")

RANKS = ("process_group", "num_experts", "max_tokens")

SPEC = Spec(
    cases=CASES,
    inputs=inputs,
    references={"": reference.experts},
    classes=dict.fromkeys(("output", *(f"gradient:{name}" for name in DIFFERENTIABLE)), "attention"),
    differentiable=DIFFERENTIABLE,
    magnitudes=magnitudes,
    deviations=deviations,
    transforms={
        **ROWS.transforms(),
        "dtype of ids": as_int32("ids"),
        "options": options(recompute={"recompute": True}, not_validated={"validate": False}),
        "bad ids": bad_ids,
    },
    illegal=ILLEGAL,
    empty=EMPTY,
    main_grad=frozenset({"gate_up", "down"}),
    autocast={"": ("hidden", "gate_up", "down", "gate_up_bias", "down_bias", "shared")},
    uncased=frozenset({"backend", "validate", *RANKS}),
    unread=frozenset({"backend", "recompute", "validate", *RANKS}),
    spared=frozenset({"recompute"}),
)
