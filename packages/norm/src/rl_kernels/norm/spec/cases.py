"""The cases of rms_norm and layer_norm: inputs, error budget, promised layouts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_kernels.core.testing import Case, Draw, Inputs, Spec
from rl_kernels.norm import reference
from rl_kernels.norm.spec.cases_dimensions import DIMENSIONS, LAYER_NORM, with_values
from rl_kernels.norm.spec.illegal import ILLEGAL
from rl_kernels.norm.spec.transforms import TRANSFORMS

BIASED = {"bias": True}
ADDED = {"residual": True}
GATED = {"gate": True}
GEMMA = {"offset": 1.0, "cast_first": False}
CASES = (
    Case("plain", {"batch": 6, "hidden": 96}),
    Case("residual", {"batch": 19, "hidden": 64}, ADDED),
    Case("residual-half", {"batch": 3, "hidden": 40}, ADDED, dtype="bf16"),
    Case("gemma", {"batch": 18, "hidden": 80}, GEMMA),
    Case("gemma-residual", {"batch": 5, "hidden": 33}, {**GEMMA, **ADDED, "eps": 1e-5}),
    Case("no-weight", {"batch": 4, "hidden": 50}, {"weight": "none"}),
    Case("weight-of-another-dtype", {"batch": 4, "hidden": 48}, {"weight": "fp32"}),
    Case("heads", {"batch": 35, "hidden": 128}, {"leading": (2, 4)}),
    Case("layer", {"batch": 17, "hidden": 100}, BIASED, LAYER_NORM),
    Case("layer-residual", {"batch": 6, "hidden": 72}, {**BIASED, **ADDED, "eps": 1e-3}, LAYER_NORM),
    Case("layer-no-weight", {"batch": 5, "hidden": 31}, {"weight": "none"}, LAYER_NORM),
    Case("layer-offset", {"batch": 3, "hidden": 260}, {**BIASED, "values": "offset"}, LAYER_NORM),
    Case("gated", {"batch": 19, "hidden": 64}, GATED),
    Case("gated-once", {"batch": 6, "hidden": 80}, {**GATED, **GEMMA, "eps": 1e-5}),
    Case("gated-no-weight", {"batch": 5, "hidden": 33}, {**GATED, "weight": "none"}),
    Case("gated-weight-of-another-dtype", {"batch": 4, "hidden": 48}, {**GATED, "weight": "fp32"}),
    Case("gated-heads", {"batch": 35, "hidden": 128}, {**GATED, "leading": (2, 4)}),
    Case("gated-large", {"batch": 7, "hidden": 40}, {**GATED, "gates": 40.0}),
    Case("llama3-8b", {"batch": 40, "hidden": 4096}, ADDED, suite="full"),
    Case("qwen3-heads", {"batch": 70, "hidden": 128}, {"leading": (2, 8)}, suite="full"),
    Case("qwen3-next-heads", {"batch": 70, "hidden": 128}, {**GATED, "leading": (2, 32)}, suite="full"),
    Case("gpt2", {"batch": 33, "hidden": 768}, BIASED, LAYER_NORM, "full"),
    *DIMENSIONS,
)
EMPTY = (
    Case("no-rows", {"batch": 0, "hidden": 7}),
    Case("no-rows-residual", {"batch": 0, "hidden": 7}, ADDED),
    Case("no-rows-gated", {"batch": 0, "hidden": 7}, GATED),
    Case("no-rows-layer", {"batch": 0, "hidden": 7}, BIASED, LAYER_NORM),
)
WEIGHTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
PASSED_ON = ("eps", "offset", "cast_first")


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw ``x[batch, hidden]``, a weight around 1, or around 0 with an offset, and what the case's options ask for."""
    asked, width = case.options, case.sizes["hidden"]
    shape = (*asked.get("leading", ()), case.sizes["batch"], width)
    # The FP64 reference does not round the sum, so these sums need no rounding; test_backends covers sums that do.
    values = asked.get("values", "coarse" if "residual" in asked else None)
    call: Inputs = {"x": with_values(draw.normal(*shape), values)}
    if asked.get("weight") != "none":
        weight = draw.uniform(0.5, 1.5, width) - asked.get("offset", 0.0)
        # FP64 is the reference.
        kept = draw.dtype == torch.float64 or "weight" not in asked
        call["weight"] = weight if kept else weight.to(WEIGHTS[asked["weight"]])
    if "bias" in asked:
        call["bias"] = draw.normal(width)
    if "residual" in asked:
        call["residual"] = with_values(draw.normal(*shape), values)
    if "gate" in asked:
        call["gate"] = draw.normal(*shape, scale=asked.get("gates", 2.0))
    return call | {name: asked[name] for name in PASSED_ON if name in asked}


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum the magnitudes of the terms; the loss from subtracting the mean is scaled by the inverse."""
    centered = case.function == LAYER_NORM
    x, residual = call["x"], call.get("residual")
    total = x if residual is None else x + residual
    size = total.abs() if residual is None else x.abs() + residual.abs()
    eps = call.get("eps", 1e-5 if centered else 1e-6)
    row = total - total.mean(-1, keepdim=True) if centered else total
    inverse = torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    size = (size + size.mean(-1, keepdim=True) if centered else size) * inverse
    # The relative error of the inverse is that of the row's squares.
    size = size + (row * inverse).abs() * (size * (row * inverse).abs()).mean(-1, keepdim=True)
    scale = (call["weight"] + call.get("offset", 0.0)).abs() if "weight" in call else torch.ones_like(x[..., :1, :])
    offset = abs(call.get("offset", 0.0)) if "weight" in call else 0.0
    factor, slope = _gate(call["gate"]) if "gate" in call else (1.0, 0.0)
    terms = {
        "output": ((scale + offset) * size + abs(call.get("bias", 0))) * factor,
        "sum": x.abs() + abs(0 if residual is None else residual),
    }
    if not upstream:
        return terms
    of_gate = upstream.get("output", torch.zeros_like(x)).abs()
    grad = of_gate * factor
    pull = grad * (scale + offset)
    part = pull + size * (pull * size).mean(-1, keepdim=True)
    if centered:
        part = part + pull.mean(-1, keepdim=True)
    dx = part * inverse + upstream.get("sum", torch.zeros_like(x)).abs()
    over = (grad * size).flatten(0, -2).sum(0), grad.flatten(0, -2).sum(0)
    return terms | {
        **dict.fromkeys(("gradient:x", "gradient:residual"), dx),
        "gradient:weight": over[0],
        "gradient:bias": over[1],
        "gradient:gate": of_gate * (scale + offset) * size * slope,
    }


def _gate(gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the magnitudes of silu and its derivative."""
    sigmoid = gate.sigmoid()
    return gate.abs() * sigmoid, sigmoid * (1 + gate.abs())


SPEC = Spec(
    cases=CASES,
    inputs=inputs,
    references={"": reference.rms_norm, LAYER_NORM: reference.layer_norm},
    classes=dict.fromkeys(
        ("output", "sum", *(f"gradient:{name}" for name in ("x", "residual", "gate", "weight", "bias"))), "reduction"
    ),
    differentiable=("x", "residual", "gate", "weight", "bias"),
    magnitudes=magnitudes,
    transforms=TRANSFORMS,
    illegal=ILLEGAL,
    empty=EMPTY,
    main_grad=frozenset({"weight"}),
    unread=frozenset({"backend"}),
)
