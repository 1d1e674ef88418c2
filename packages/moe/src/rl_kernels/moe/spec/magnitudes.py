"""Bounds on the rounding errors of experts: sums of the magnitudes of terms, through both products."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_kernels.core.testing import Case, Inputs
from rl_kernels.moe.reference import LIMIT, SLOPE, split

STEEP = 1.2
"""Bound of the first two derivatives of ``x sigmoid(a x)`` for a of 1 and 1.702, and of GELU."""


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum the magnitudes of the terms of the output and the gradients; an error of z scales by the slopes."""
    hidden, ids, weights = call["hidden"], call["ids"], call["weights"].double().abs()
    is_transposed = call.get("transposed", False)
    gate_up, down = (x.mT if is_transposed else x for x in (call["gate_up"], call["down"]))
    sums = {"output": torch.zeros_like(hidden) if "shared" not in call else call["shared"].abs()}
    sums |= {f"gradient:{name}": torch.zeros_like(call[name]) for name in GRADIENTS if name in call}
    sums["gradient:gate_up"], sums["gradient:down"] = torch.zeros_like(gate_up), torch.zeros_like(down)
    grad = upstream.get("output", torch.zeros_like(hidden)).abs()
    for expert in range(gate_up.shape[0]):
        tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
        scale, pull = weights[tokens, slots][:, None], grad[tokens] @ down[expert].abs()
        h, dz = _activation(call, expert, hidden[tokens], gate_up[expert], scale * pull)
        y, dot = h @ down[expert].abs().t(), (pull * h).sum(1)
        if "down_bias" in call:
            bias = call["down_bias"][expert].abs()
            y, dot = y + bias, dot + grad[tokens] @ bias
            sums["gradient:gate_up_bias"][expert] = dz.sum(0)
            sums["gradient:down_bias"][expert] = (scale * grad[tokens]).sum(0)
        sums["output"].index_add_(0, tokens, scale * y)
        sums["gradient:weights"][tokens, slots] = dot.to(call["weights"].dtype)
        sums["gradient:hidden"].index_add_(0, tokens, dz @ gate_up[expert].abs())
        sums["gradient:gate_up"][expert] = dz.t() @ hidden[tokens].abs()
        sums["gradient:down"][expert] = grad[tokens].t() @ (scale * h)
    if "shared" in call:
        sums["gradient:shared"] = grad
    if is_transposed:
        sums |= {name: sums[name].mT for name in ("gradient:gate_up", "gradient:down")}
    return sums


GRADIENTS = ("hidden", "weights", "gate_up_bias", "down_bias")


def _activation(
    call: Inputs, expert: int, rows: torch.Tensor, weight: torch.Tensor, dh: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return magnitudes of the activation, and of the gradient of z from that of the activation."""
    z, size = rows @ weight.t(), rows.abs() @ weight.abs().t()
    if "gate_up_bias" in call:
        z, size = z + call["gate_up_bias"][expert], size + call["gate_up_bias"][expert].abs()
    interleaved = call.get("interleaved", False)
    (gate, up), (gate_size, up_size) = split(z, interleaved), split(size, interleaved)
    up = up.abs()
    if call.get("activation") == "clamped_swiglu":
        gate, up = gate.clamp(max=LIMIT), up.clamp(max=LIMIT) + 1
    act = (gate * torch.sigmoid(SLOPE * gate)).abs() + gate.abs()
    h = act * up + STEEP * up * gate_size + act * up_size
    dz = torch.empty_like(z)
    for part, value in zip(
        split(dz, interleaved),
        (dh * STEEP * (up + up_size + up * gate_size), dh * (act + STEEP * gate_size)),
        strict=True,
    ):
        part.copy_(value)
    return h, dz
