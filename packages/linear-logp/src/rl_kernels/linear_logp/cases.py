"""The cases of linear_logp: inputs, error budget, promised layouts."""

from __future__ import annotations

import functools
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
from rl_kernels.linear_logp import reference
from rl_kernels.linear_logp.illegal import ILLEGAL

STATS = {"return_stats": True}

CASES = (
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
    Case("segments", {"batch": 2, "seq": 9, "hidden": 17, "vocab": 9001}, {**STATS, "bias": True, "workspace_mib": 1}),
    Case("odd", {"batch": 3, "seq": 3, "hidden": 33, "vocab": 1025}, STATS),
    Case("one-token", {"batch": 1, "seq": 1, "hidden": 64, "vocab": 515}, STATS),
    Case("one-feature", {"batch": 2, "seq": 9, "hidden": 1, "vocab": 7}, STATS),
    Case("one-entry", {"batch": 2, "seq": 8, "hidden": 24, "vocab": 1}, {**STATS, "bias": True}),
    Case("beyond-exp", {"batch": 1, "seq": 6, "hidden": 16, "vocab": 300}, {**STATS, "bias": True, "offset": 100.0}),
    Case("peaked", {"batch": 1, "seq": 6, "hidden": 64, "vocab": 500}, {**STATS, "scale": 8.0}),
    Case(
        "masked-vocabulary",
        {"batch": 1, "seq": 6, "hidden": 32, "vocab": 200},
        {**STATS, "bias": True, "minus_inf": 0.3},
    ),
    Case("qwen3-vocabulary", {"batch": 1, "seq": 3, "hidden": 16, "vocab": 151936}, STATS, suite="full"),
    Case("gpt2-vocabulary", {"batch": 1, "seq": 4, "hidden": 24, "vocab": 50257}, STATS, suite="full"),
    Case("llama3-hidden", {"batch": 1, "seq": 3, "hidden": 4096, "vocab": 300}, STATS, suite="full"),
    Case("many-rows", {"batch": 4, "seq": 500, "hidden": 16, "vocab": 33}, {"workspace_mib": 1}, suite="full"),
)
EMPTY = (Case("no-rows", {"batch": 0, "seq": 5, "hidden": 16, "vocab": 33}, {**STATS, "bias": True}),)
DRAWN = frozenset({"scale", "offset", "minus_inf", "bias", "temperature"})
"""Options that shape the inputs; the others are passed on as keyword arguments."""


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw ``hidden[batch, seq, hidden]``, a weight of scale ``hidden^-0.5``, ids, and what the case asks for."""
    batch, seq, size, vocab = (case.sizes[name] for name in ("batch", "seq", "hidden", "vocab"))
    asked = case.options
    ids = draw.ids(vocab, batch, seq)
    call: Inputs = {
        "hidden": draw.normal(batch, seq, size, scale=asked.get("scale", 1.0)),
        "lm_head_weight": draw.normal(vocab, size, scale=size**-0.5),
        "target_ids": ids,
    }
    if asked.get("bias"):
        bias = draw.normal(vocab) + asked.get("offset", 0.0)
        if "minus_inf" in asked:
            targets = torch.zeros(vocab, dtype=torch.bool, device=draw.device).index_fill(0, ids.flatten(), True)
            bias = bias.masked_fill(draw.mask(asked["minus_inf"], vocab) & ~targets, -torch.inf)
        call["bias"] = bias
    if "ignore_index" in asked:
        call["target_ids"] = ids.masked_fill(draw.mask(0.4, batch, seq), asked["ignore_index"])
    if "temperature" in asked:
        per_token = asked["temperature"] == "tensor"
        call["temperature"] = (
            draw.uniform(0.5, 2.0, batch, seq, dtype=torch.float32) if per_token else asked["temperature"]
        )
    return call | {name: value for name, value in asked.items() if name not in DRAWN}


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bound the terms: those of each logit by sums of |hidden| |W| + |bias|, those of the gradients through them."""
    ids, hidden, weight = call["target_ids"], call["hidden"], call["lm_head_weight"].abs()
    active = (ids != call["ignore_index"]).double() if "ignore_index" in call else torch.ones_like(ids).double()
    temperature = call.get("temperature", 1.0)
    scale = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    bias = call.get("bias", hidden.new_zeros(()))
    z = (hidden @ call["lm_head_weight"].T + bias) / scale
    size = (hidden.abs() @ weight.T + torch.where(bias == -torch.inf, 0.0, bias.abs())) / scale
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp()
    top = size.amax(-1) + lse.abs()
    surprise = p * (size + lse.abs()[..., None] + 1)
    terms = {"logp": 2 * top, "logsumexp": top, "entropy": surprise.sum(-1) + top}
    chosen = torch.nn.functional.one_hot(ids.clamp(min=0).long(), z.shape[-1])
    grads = {"logp": (chosen + p) * (1 + top[..., None]), "logsumexp": p * (1 + top[..., None])}
    grads["entropy"] = surprise * (2 + top[..., None])
    dlogits = torch.zeros_like(z)
    for name, value in upstream.items():
        dlogits += grads[name] * (value.abs() * active)[..., None] / scale
    rows = dlogits.flatten(0, -2)
    dweight = rows.T @ hidden.abs().flatten(0, -2)
    gradients = {"hidden": dlogits @ weight, "lm_head_weight": dweight, "bias": rows.sum(0)}
    return {**terms, **{f"gradient:{name}": value for name, value in gradients.items()}}


ROWS = RowLayout(
    arguments={"hidden": 1, "target_ids": 0, "temperature": 0},
    results=frozenset({"logp", "logsumexp", "entropy", "gradient:hidden"}),
    ids="target_ids",
)
WEIGHTS = ("gradient:lm_head_weight", "gradient:bias")


def number_as_tensor(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Give a temperature once as a number, once as a tensor of equal values."""
    if isinstance(call.get("temperature", 1.0), torch.Tensor):
        return
    value = torch.full(call["target_ids"].shape, call.get("temperature", 1.0), device=draw.device)
    yield Variant("temperature as a tensor", {**call, "temperature": value})


def appended(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Append ignored rows of NaN: the gradients of weight and bias, sums over tokens, keep their bits too."""
    count = call["target_ids"].numel()
    flat = {"hidden": call["hidden"].flatten(0, -2), "target_ids": call["target_ids"].flatten()}
    if isinstance(call.get("temperature"), torch.Tensor):
        flat["temperature"] = call["temperature"].flatten()
    fills = {"hidden": torch.nan, "target_ids": IGNORED, "temperature": 1.0}

    def longer(value: torch.Tensor, fill: float, rows: int) -> torch.Tensor:
        return torch.cat((value, value.new_full((rows, *value.shape[1:]), fill)))

    def kept(name: str, result: torch.Tensor) -> torch.Tensor:
        return result if name in WEIGHTS else result.flatten(0, call["target_ids"].ndim - 1)

    def first(name: str, result: torch.Tensor) -> torch.Tensor:
        return result if name in WEIGHTS else result[:count]

    for rows in (1, 23):
        changed = {name: longer(value, fills[name], rows) for name, value in flat.items()}
        lift = functools.partial(_lift, rows)
        yield Variant(f"{rows} ignored rows appended", {**call, **changed, "ignore_index": IGNORED}, kept, first, lift)


def _lift(rows: int, name: str, upstream: torch.Tensor) -> torch.Tensor:
    return torch.cat((upstream.flatten(), upstream.new_full((rows,), torch.nan)))


TRANSFORMS = {
    **ROWS.transforms(),
    "temperature": number_as_tensor,
    "workspace": options(small_workspace={"workspace_mib": 1}, large_workspace={"workspace_mib": 4096}),
    "options": options(
        with_statistics=STATS, with_ignore_index={"ignore_index": IGNORED}, unchecked={"validate": False}
    ),
}


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
    hygiene={**ROWS.hygiene(), "appended": appended},
    empty=EMPTY,
    unread=frozenset({"workspace_mib", "validate", "backend"}),
    output="logp",
    adds=frozenset({"return_stats"}),
    ids=("target_ids",),
)
