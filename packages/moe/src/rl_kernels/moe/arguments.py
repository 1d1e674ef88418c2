"""Checks of the arguments of experts and the choice of a backend, remembered for calls of one kind."""

from __future__ import annotations

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.moe.activations import NAMES
from rl_kernels.moe.op import OPERATOR, describe, ops


@remembered
def prepare(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    shared: torch.Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
    keeps: bool,
    backend: str | None,
) -> Ready:
    """Check the arguments, choose a backend, and prepare the forward pass; ``keeps``: that of ``forward_kept``."""
    _check_operands(hidden, gate_up, down, transposed)
    check.tensor("ids", ids, check.INTEGERS, ndim=2)
    if not 1 <= ids.shape[1]:
        raise ValueError(f"ids: expected at least one slot a token, got shape {tuple(ids.shape)}")
    check.shape("ids", ids, (hidden.shape[0], ids.shape[1]), "tokens of hidden by slots")
    check.tensor("weights", weights, check.HALF_AND_FLOAT, ndim=2)
    check.shape("weights", weights, ids.shape, "that of ids")
    count, width, inner = gate_up.shape[0], hidden.shape[1], _inner(down, transposed)
    for name, bias, size in (("gate_up_bias", gate_up_bias, 2 * inner), ("down_bias", down_bias, width)):
        if bias is not None:
            check.tensor(name, bias, check.HALF_AND_FLOAT, ndim=2)
            check.shape(name, bias, (count, size), "experts by outputs of the product")
    if shared is not None:
        check.tensor("shared", shared, check.HALF_AND_FLOAT, ndim=2)
        check.shape("shared", shared, hidden.shape, "that of hidden")
    operands = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    check.same_dtype(hidden=hidden, **operands, shared=shared)
    check.same_device(hidden=hidden, ids=ids, weights=weights, **operands, shared=shared)
    check.choice("activation", activation, NAMES)
    check.flag("interleaved", interleaved)
    check.backend_name(backend)
    if transposed:
        gate_up, down = gate_up.mT, down.mT
    name = choose(OPERATOR, describe(hidden, gate_up, down, ids), backend).name
    op = ops["forward_kept" if keeps else "forward"]
    form = (gate_up_bias, down_bias, shared, activation, interleaved)
    return op.ready(hidden, gate_up, down, ids, weights, *form, name)


def _check_operands(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, transposed: bool) -> None:
    check.tensor("hidden", hidden, check.HALF_AND_FLOAT, ndim=2)
    check.tensor("gate_up", gate_up, check.HALF_AND_FLOAT, ndim=3)
    check.tensor("down", down, check.HALF_AND_FLOAT, ndim=3)
    check.flag("transposed", transposed)
    if 0 in (gate_up.shape[0], hidden.shape[1], _inner(down, transposed)):
        raise ValueError(
            f"down: expected at least one expert, D and F of at least 1, got shapes {tuple(gate_up.shape)} of gate_up "
            f"and {tuple(down.shape)}"
        )
    count, width, inner = gate_up.shape[0], hidden.shape[1], _inner(down, transposed)
    shapes = ((count, 2 * inner, width), (count, width, inner))
    if transposed:
        shapes = ((count, width, 2 * inner), (count, inner, width))
    check.shape("down", down, shapes[1], "experts of gate_up, D of hidden, F")
    check.shape("gate_up", gate_up, shapes[0], "experts, twice the F of down, D of hidden")


def _inner(down: torch.Tensor, transposed: bool) -> int:
    return down.shape[1 if transposed else 2]


def check_ids(ids: torch.Tensor, experts: int, validate: bool | None) -> None:
    """Require ids in ``[0, experts]`` if ``validate``; None: on a CPU, where that waits for nothing."""
    if validate is not None:
        check.flag("validate", validate)
    if validate or (validate is None and ids.device.type == "cpu"):
        check.ids_in_range("ids", ids, experts + 1, ignorable=False)
