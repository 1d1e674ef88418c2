"""What grpo_loss is to the registry and to torch: schemas, fake kernels, backends and their promises.

In the raw ops all tensors are on one device but ``eps`` (no dims) and ``numbers`` (clip_eps, beta, eps): FP64
on the CPU, so that a graph is good for all their values. Log-probabilities and the mask are ``[B, T]`` of any strides;
a mask of any dtype, in which all but 0 is active. A loss takes either ``rewards[B]`` with their groups, or
``advantages``, ``[B]`` or ``[B, T]``. Groups are ``boundaries[G + 1]``, int64, of any values: outside ``[0, B]`` they
are clamped; or, where these are None, all of the size ``samples``. ``old_logps`` None means a ratio of 1, ``ref_logps``
None no KL. Results are FP32 (FP64 for FP64 inputs).

``forward_grad`` returns ``count`` too, the number of active tokens and at least 1, and ``slope[B, T]``: the gradient to
current_logps times that count for an upstream of one, and -0 at masked tokens and nowhere else. ``backward`` scales it,
makes masked tokens +0 whatever the upstream, and casts it to the dtype of current_logps, of which it reads no value.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core import torchlib
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.rowwise import compute_dtype
from rl_kernels.core.triton_lib.launch import triton_backend

_INPUTS = (
    "Tensor current_logps, Tensor? old_logps, Tensor? ref_logps, Tensor? rewards, Tensor? boundaries, SymInt samples, "
    "Tensor? advantages, Tensor mask, Tensor numbers"
)

SCHEMAS = {
    "advantages": "(Tensor rewards, Tensor? boundaries, SymInt samples, Tensor eps, str backend) -> Tensor",
    "forward": f"({_INPUTS}, str backend) -> (Tensor, Tensor, Tensor)",
    "forward_grad": f"({_INPUTS}, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "backward": "(Tensor current_logps, Tensor count, Tensor slope, Tensor upstream, str backend) -> Tensor",
}


def _scalars(current_logps: torch.Tensor, count: int = 3) -> tuple[torch.Tensor, ...]:
    return tuple(current_logps.new_empty((), dtype=compute_dtype(current_logps.dtype)) for _ in range(count))


def _scalars_and_slope(current_logps: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    slope = current_logps.new_empty(current_logps.shape, dtype=compute_dtype(current_logps.dtype))
    return *_scalars(current_logps, 4), slope


FAKES = {
    "advantages": lambda rewards, *_: rewards.new_empty(rewards.shape, dtype=compute_dtype(rewards.dtype)),
    "forward": lambda current_logps, *_: _scalars(current_logps),
    "forward_grad": _scalars_and_slope,
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
