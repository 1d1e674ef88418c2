"""The cases of gated_delta_rule: inputs, error budget, promised layouts."""

from __future__ import annotations

import random

import torch

from rl_kernels.core.testing import Case, Draw, Inputs, Spec
from rl_kernels.gated_delta import reference
from rl_kernels.gated_delta.spec.cases_dimensions import DIMENSIONS, sizes
from rl_kernels.gated_delta.spec.illegal import ILLEGAL
from rl_kernels.gated_delta.spec.magnitudes import NAMES, deviations, magnitudes
from rl_kernels.gated_delta.spec.places import TOKENS, left_padded, packed, sequences_of
from rl_kernels.gated_delta.spec.transforms import TRANSFORMS

STATE = {"return_state": True}
CASES = (
    Case("plain", sizes(2, 20)),
    Case("chunks", sizes(1, 150, 1, 1), STATE),
    Case("left", sizes(3, 40), {**STATE, "layout": "left"}),
    Case("packed", sizes(5, 25), {**STATE, "layout": "packed"}),
    Case("initial", sizes(2, 66, 1, 2, 16, 32), {**STATE, "initial_state": True}),
    Case("scaled", sizes(1, 17, 2, 1, 32, 16), {"scale": 0.37, "normalize_qk": False}),
    Case("no-decay", sizes(1, 70), {**STATE, "decays": "none"}),
    Case("tiny-decay", sizes(1, 70), {**STATE, "decays": "tiny"}),
    Case("steep-decay", sizes(1, 70), {**STATE, "decays": "steep"}),
    Case("no-update", sizes(1, 33), {**STATE, "strength": 0.0, "initial_state": True}),
    Case("whole-update", sizes(1, 70), {**STATE, "strength": 1.0}),
    Case("zero-keys", sizes(1, 33), {**STATE, "keys": "some zero", "normalize_qk": False}),
    # A norm's gradient at 0 is a thousand times the upstream one, beyond the fences of 16 bits.
    Case("zero-keys-normalized", sizes(1, 33), {**STATE, "keys": "some zero"}, dtype="fp32"),
    Case("equal-keys", sizes(1, 70), {**STATE, "keys": "equal"}),
    Case("gates-of-16-bits", sizes(1, 20), {"gates": torch.bfloat16}),
    Case("qwen3-next", sizes(1, 130, 2, 2, 128, 128), STATE, suite="full"),
    Case("widest", sizes(1, 70, 1, 1, 256, 256), STATE, suite="full"),
    *DIMENSIONS,
)
EMPTY = (
    # No gradient of the definition passes through no token.
    Case("no-tokens", sizes(2, 0), {**STATE, "initial_state": True}, grad=False),
    Case("no-sequences", sizes(0, 5), STATE),
)
DRAWN = frozenset({"layout", "decays", "strength", "keys", "gates", "initial_state"})
"""Options that shape the inputs; all others are passed on as keyword arguments."""
LARGEST = 256


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw the operands, laid out as the case asks; keys have unit scale if they are not normalized."""
    options = case.options
    batch, tokens, key_heads, group = (case.sizes[name] for name in ("batch", "tokens", "key_heads", "group"))
    size, value_size = (_head_size(case.sizes[name]) for name in ("key_size", "value_size"))
    heads, is_unit = key_heads * group, options.get("normalize_qk", True)
    q, k = (draw.normal(batch, tokens, key_heads, size, scale=1.0 if is_unit else size**-0.5) for _ in range(2))
    v = draw.normal(batch, tokens, heads, value_size)
    if options.get("keys") == "equal":
        k = k[:, :1].expand_as(k).contiguous()
    elif options.get("keys") == "some zero":
        k[:, ::3] = 0
    gates = torch.float64 if q.dtype == torch.float64 else options.get("gates", torch.float32)
    largest = {"none": 0.0, "tiny": 1e-6, "steep": 20.0}.get(options.get("decays", ""), 0.3)
    g = -draw.uniform(0.0, 1.0, batch, tokens, heads, dtype=gates) * largest
    beta = draw.uniform(0.0, 1.0, batch, tokens, heads, dtype=gates)
    if "strength" in options:
        beta = torch.full_like(beta, options["strength"])
    call: Inputs = dict(zip(TOKENS, (q, k, v, g, beta), strict=True))
    if options.get("initial_state"):
        state = torch.float64 if q.dtype == torch.float64 else torch.float32
        call["initial_state"] = draw.normal(batch, heads, size, value_size, scale=0.3, dtype=state)
    return _laid_out(case, call) | {name: value for name, value in options.items() if name not in DRAWN}


def _head_size(size: int) -> int:
    return min(max(1 << (size - 1).bit_length(), 16), LARGEST)


def _laid_out(case: Case, call: Inputs) -> Inputs:
    layout = case.options.get("layout")
    if layout is None or not call["q"].numel():
        return call
    most = call["q"].shape[1]
    source = random.Random(case.drawn_as or case.name)
    counts = [most, 0, *(source.randint(0, most) for _ in range(len(call["q"])))]
    sequences = [x.first(count) for x, count in zip(sequences_of(call), counts, strict=False)]
    return packed(sequences) if layout == "packed" else left_padded(sequences, 0, 0.0)


def waits(call: Inputs, backend: str | None) -> str | None:
    """Return the reason why a call reads from the device, which syncs, or None."""
    return "native reads bounds on the host" if backend == "native" and {"cu_seqlens", "start"} & call.keys() else None


SPEC = Spec(
    cases=CASES,
    inputs=inputs,
    references={"": reference.gated_delta_rule},
    classes=dict.fromkeys(("out", "state", *(f"gradient:{name}" for name in NAMES)), "attention"),
    differentiable=NAMES,
    magnitudes=magnitudes,
    deviations=deviations,
    transforms=TRANSFORMS,
    illegal=ILLEGAL,
    empty=EMPTY,
    unread=frozenset({"validate", "backend", "cache"}),
    uncased=frozenset({"validate", "backend", "cache"}),
    output="out",
    spared=frozenset({"return_state"}),
    waits=waits,
)
