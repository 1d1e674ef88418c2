"""Standard deviations of the errors of weights' gradients by rounded intermediate values, for the checker's fence.

A gradient of an expert's weight adds up products with rounded values, one for each route, so its error grows with the
root of the number of routes; that of a route's weight is such a sum over F. An error of rounding v is uniform: its
deviation is ``eps / sqrt(12)`` times the power of two below v. ``h`` depends on z and the steps of the activation,
``dz`` on z.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from rl_kernels.core.testing import Case, Inputs
from rl_kernels.moe.reference import LIMIT, SLOPE, activate, split


def deviations(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the deviations of the gradients of routes' weights, gate_up and down, in units of ``eps / sqrt(12)``."""
    hidden, ids, weights = call["hidden"], call["ids"], call["weights"].to(call["hidden"].dtype)
    is_transposed, interleaved = call.get("transposed", False), call.get("interleaved", False)
    gate_up, down = (x.mT if is_transposed else x for x in (call["gate_up"], call["down"]))
    grad = upstream.get("output", torch.zeros_like(hidden))
    dots, first, second = torch.zeros_like(weights), torch.zeros_like(gate_up), torch.zeros_like(down)
    for expert in range(len(down)):
        tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
        x, g, scale = hidden[tokens], grad[tokens], weights[tokens, slots][:, None]
        z = x @ gate_up[expert].t()
        z = z + call["gate_up_bias"][expert] if "gate_up_bias" in call else z
        dh = g @ down[expert]
        h, of_h, of_dz = _variances(*split(z, interleaved), scale * dh, call.get("activation", "silu"))
        dots[tokens, slots] = (dh.square() * of_h).sum(1)
        # Rows of the gradient of gate_up lie as those of z. The product of a route's weight and h is rounded too.
        for rows, variance in zip(split(first[expert].t(), interleaved), of_dz, strict=True):
            rows.copy_(x.square().t() @ variance)
        second[expert] = g.square().t() @ (scale.square() * of_h + _spacing(scale * h).square())
    first, second = (x.sqrt_().mT if is_transposed else x.sqrt_() for x in (first, second))
    return {
        "gradient:weights": dots.sqrt_().to(call["weights"].dtype),
        "gradient:gate_up": first,
        "gradient:down": second,
    }


def _variances(
    gate: torch.Tensor, up: torch.Tensor, dh: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return h, its variance, and those of both parts of dz, which is rounded once."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (gate, up)]
        h = activate(leaves[0], leaves[1], activation)
        parts = torch.autograd.grad((h * dh).sum(), leaves, create_graph=True)
        of_dz = [_moved(part, leaves) + _spacing(part.detach()).square() for part in parts]
        of_h = _moved(h, leaves) + _spacing(h.detach()).square()
    for value, slope in _steps(gate, up, activation):
        of_h += (slope * _spacing(value)).square()
    return h.detach(), of_h, of_dz


def _moved(value: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    """Return the variance of a function of gate and up, element by element, if both are rounded."""
    of_gate, of_up = torch.autograd.grad(value.sum(), leaves, retain_graph=True, materialize_grads=True)
    gate, up = (_spacing(x.detach()) for x in leaves)
    return (of_gate * gate).square() + (of_up * up).square()


def _steps(gate: torch.Tensor, up: torch.Tensor, activation: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield values between z and h that are rounded, and the slope of h in each."""
    if activation != "clamped_swiglu":
        yield (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")), up
        return
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
    sigmoid = torch.sigmoid(gate * SLOPE)
    yield gate * SLOPE, up * gate * sigmoid * (1 - sigmoid)
    yield sigmoid, up * gate
    yield gate * sigmoid, up
    yield up, gate * sigmoid


def _spacing(value: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two that is no larger than the magnitude of each value; 0 for 0."""
    power = torch.ldexp(torch.ones_like(value), torch.frexp(value).exponent - 1)
    return torch.where(value == 0, 0.0, power)
