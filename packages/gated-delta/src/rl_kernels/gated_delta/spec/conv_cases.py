"""The cases of causal_conv1d: inputs, error budget, promised layouts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch

from rl_kernels.core.testing import Case, Draw, Inputs, Spec
from rl_kernels.gated_delta import conv_reference as reference
from rl_kernels.gated_delta.spec.conv_illegal import ILLEGAL
from rl_kernels.gated_delta.spec.conv_transforms import HYGIENE, TRANSFORMS
from rl_kernels.lab.dimensions import drawn, paired, swept

STATE = {"state": True, "return_state": True}
AXES = {
    "bias": (None, True),
    "state": (None, True),
    "return_state": (None, True),
    "activation": (None, "none"),
    "layout": (None, "left", "packed"),
    "weight": (None, "fp32"),
    "dtype": (None, "bf16", "fp16", "fp64"),
}
TURNS = ({"bias": True}, STATE, {"layout": "left", **STATE}, {"layout": "packed", "bias": True, **STATE})
LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 200)
WIDTHS = (1, 2, 3, 15, 16, 17, 64, 127, 129, 256, 257, 300)
CASES = (
    Case("plain", {"batch": 2, "seq": 70, "width": 24}),
    Case("bias", {"batch": 3, "seq": 9, "width": 17}, {"bias": True}),
    Case("linear", {"batch": 2, "seq": 12, "width": 8}, {"activation": "none"}),
    Case("state", {"batch": 3, "seq": 5, "width": 16}, {"bias": True, **STATE}),
    Case("token", {"batch": 4, "seq": 1, "width": 40}, STATE),
    Case("two-tokens", {"batch": 2, "seq": 2, "width": 16}, STATE),
    Case("left", {"batch": 3, "seq": 71, "width": 16}, {"layout": "left", **STATE}),
    Case("packed", {"batch": 6, "seq": 66, "width": 16}, {"layout": "packed", "bias": True, **STATE}),
    Case("weight-of-another-dtype", {"batch": 2, "seq": 7, "width": 16}, {"weight": "fp32"}),
    Case("qwen3-next", {"batch": 2, "seq": 300, "width": 8192}, suite="full"),
    *paired("pairs", {"batch": 3, "seq": 11, "width": 12}, AXES),
    *drawn("drawn", {"batch": 4, "seq": 67, "width": 10}, AXES, 40, suite="full"),
    *swept("seq", {"batch": 2, "width": 8}, LENGTHS, TURNS),
    *swept("width", {"batch": 2, "seq": 6}, WIDTHS, TURNS),
    *swept("seq", {"batch": 2, "width": 8}, (1000, 4096), TURNS, suite="full"),
)
EMPTY = (
    Case("no-tokens", {"batch": 2, "seq": 0, "width": 7}, STATE),
    Case("no-sequences", {"batch": 0, "seq": 5, "width": 7}, STATE),
    Case("no-packed-sequences", {"batch": 0, "seq": 0, "width": 7}, {"layout": "packed", **STATE}),
)
WEIGHTS = {"fp32": torch.float32}


def lengths(case: Case) -> list[int]:
    """Return the lengths of a case's sequences: left padded and packed ones differ, and some are empty."""
    batch, count = case.sizes["batch"], case.sizes["seq"]
    pattern = [count, 0, 1, count // 2, max(count - 1, 0), 0]
    return [pattern[number % len(pattern)] for number in range(batch)] if "layout" in case.options else [count] * batch


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw x, a weight, and what the case's options ask for."""
    asked, (batch, count, width) = case.options, (case.sizes[name] for name in ("batch", "seq", "width"))
    counts, layout = lengths(case), asked.get("layout")
    shape = (1, sum(counts), width) if layout == "packed" else (batch, count, width)
    weight = draw.normal(width, 4, scale=0.5)
    # FP64 is the reference.
    kept = draw.dtype == torch.float64 or "weight" not in asked
    call: Inputs = {"x": draw.normal(*shape), "weight": weight if kept else weight.to(WEIGHTS[asked["weight"]])}
    if "bias" in asked:
        call["bias"] = draw.normal(width)
    if "state" in asked:
        call["state"] = draw.normal(batch, 3, width)
    if layout == "packed":
        call["cu_seqlens"] = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=draw.device)
    if layout == "left":
        call["start"] = torch.tensor([count - used for used in counts], device=draw.device)
    if "activation" in asked:
        call["activation"] = None
    return call | {name: asked[name] for name in ("return_state",) if name in asked}


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum the magnitudes of the terms: the convolution of magnitudes, and its gradients."""
    linear = {**call, "activation": None, "return_state": True}
    names = [name for name in ("x", "weight", "bias", "state") if name in call]
    sizes = [call[name].detach().abs().requires_grad_() for name in names]
    of_sum, last = reference.causal_conv1d(**{**linear, **dict(zip(names, sizes, strict=True))})
    z, _ = reference.causal_conv1d(**linear)
    z, size = z.detach(), of_sum.detach()
    sigmoid = z.sigmoid()
    slope = sigmoid * (1 + z * (1 - sigmoid))
    silu = call.get("activation", "silu") == "silu"
    terms = {"out": slope.abs() * size + (z * sigmoid).abs() if silu else size, "state": last.detach()}
    if not upstream:
        return terms
    grad = upstream.get("out", torch.zeros_like(z)).abs()
    # The second derivative of silu is at most 0.5.
    grad = grad * (0.5 * size + sigmoid * (1 + z.abs())) if silu else grad
    of_last = upstream.get("state", torch.zeros_like(last)).abs()
    gradients = torch.autograd.grad((of_sum, last), sizes, (grad, of_last), materialize_grads=True)
    return terms | {f"gradient:{name}": value for name, value in zip(names, gradients, strict=True)}


SPEC = Spec(
    cases=CASES,
    inputs=inputs,
    references={"": reference.causal_conv1d},
    classes=dict.fromkeys(
        ("out", "state", *(f"gradient:{name}" for name in ("x", "weight", "bias", "state"))), "reduction"
    ),
    differentiable=("x", "weight", "bias", "state"),
    magnitudes=magnitudes,
    transforms=TRANSFORMS,
    hygiene=HYGIENE,
    illegal=ILLEGAL,
    empty=EMPTY,
    unread=frozenset({"validate", "backend"}),
    output="out",
)
