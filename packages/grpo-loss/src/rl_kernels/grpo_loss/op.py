"""What grpo_loss is to the registry and to torch: schemas, fake kernels, backends and their promises.

In the raw ops all tensors are on one device but the numbers ``eps``, ``clip_eps`` and ``beta``: tensors without dims,
FP64, on the CPU, so that a graph is good for all their values. Log-probabilities and the mask (bool) are ``[B, T]`` of
any strides; advantages ``[B]`` or ``[B, T]``; rewards ``[B]``; boundaries ``[G + 1]``, int64, of any values: outside
``[0, B]`` they are clamped. ``old_logps`` None means a ratio of 1, ``ref_logps`` None no KL. Results are FP32 (FP64 for
FP64 inputs).

``forward_grad`` returns ``unit_grad[B, T]`` too, the gradient to current_logps for an upstream of one; ``backward``
scales it and casts it to the dtype of current_logps, of which it reads no value.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core import torchlib
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.rowwise import compute_dtype
from rl_kernels.core.triton_lib.launch import triton_backend

_INPUTS = (
    "Tensor current_logps, Tensor? old_logps, Tensor? ref_logps, Tensor advantages, Tensor mask, "
    "Tensor clip_eps, Tensor beta"
)

SCHEMAS = {
    "advantages": "(Tensor rewards, Tensor boundaries, Tensor eps, str backend) -> Tensor",
    "forward": f"({_INPUTS}, str backend) -> (Tensor, Tensor, Tensor)",
    "forward_grad": f"({_INPUTS}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    "backward": "(Tensor current_logps, Tensor unit_grad, Tensor mask, Tensor upstream, str backend) -> Tensor",
}


def _scalars(current_logps: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loss, policy_loss, kl = (current_logps.new_empty((), dtype=compute_dtype(current_logps.dtype)) for _ in range(3))
    return loss, policy_loss, kl


def _scalars_and_grad(current_logps: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    unit_grad = current_logps.new_empty(current_logps.shape, dtype=compute_dtype(current_logps.dtype))
    return *_scalars(current_logps), unit_grad


FAKES = {
    "advantages": lambda rewards, *_: rewards.new_empty(rewards.shape, dtype=compute_dtype(rewards.dtype)),
    "forward": _scalars,
    "forward_grad": _scalars_and_grad,
    "backward": lambda current_logps, *_: current_logps.new_empty(current_logps.shape),
}


def describe(current_logps: torch.Tensor, *_: object, **__: object) -> Call:
    """Describe a call of a public function to the dispatcher, by its first tensor."""
    return Call.of(current_logps)


OPERATOR = Operator(
    name="grpo_loss",
    package="rl_kernels.grpo_loss",
    summary="GRPO loss: group advantages, clipped policy term and KL, gradient in the same pass",
    shape=("B", "T"),
    rows=frozenset({"B", "T"}),
    schemas=SCHEMAS,
    fakes=FAKES,
    backends=(
        triton_backend("rl_kernels.grpo_loss.triton_backend"),
        Backend("native", "rl_kernels.grpo_loss.native", {"cpu": INVARIANT, "cuda": INVARIANT}),
    ),
    describe=describe,
)

ops = torchlib.define(OPERATOR)
