"""What grpo_loss is to the registry and to torch: schemas, fake kernels, backends and their promises.

In the raw ops all tensors are on one device but ``eps`` (no dims) and ``numbers`` (of ``objective.Numbers``): FP64 on
the CPU, so that a graph is good for all their values. Log-probabilities and the mask are ``[B, T]`` of any strides;
a mask of any dtype, in which all but 0 is active. A loss takes either ``rewards[B]`` with their groups, or
``advantages``, ``[B]`` or ``[B, T]``. Groups are ``boundaries[G + 1]``, int64, of any values: outside ``[0, B]`` they
are clamped; or, where these are None, all of the size ``samples``. ``old_logps`` None means a ratio of 1, ``ref_logps``
None no KL. ``rollout_ratio`` is ``[B]`` or ``[B, T]``, ``normaliser`` has no dims. With ``cu_seqlens[B + 1]`` what is
``[B, T]`` otherwise is ``[total]``, advantages and rollout ratios a token ``[1, total]``, and T is ``max_seqlen``.
``plan`` and ``estimator`` are the texts of ``objective.Plan`` and ``estimator.Estimator``. Results are FP32 (FP64 for
FP64 inputs); metrics are FP32, empty where they are not wanted.

``forward_grad`` returns ``divisor`` too, what the sums over the batch are divided by, and ``slope``, of the shape of
current_logps: the gradient to it times that divisor for an upstream of one, and -0 at masked tokens and nowhere else.
``backward`` scales it, makes masked tokens +0 whatever the upstream, and casts it to the dtype of current_logps, of
which it reads no value.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core import torchlib
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.rowwise import compute_dtype
from rl_kernels.core.triton_lib.launch import triton_backend
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.outputs import METRICS

_INPUTS = (
    "Tensor current_logps, Tensor? old_logps, Tensor? ref_logps, Tensor? rewards, Tensor? boundaries, SymInt samples, "
    "Tensor? advantages, Tensor mask, Tensor? rollout_ratio, Tensor? entropy, Tensor? normaliser, Tensor? cu_seqlens, "
    "SymInt max_seqlen, Tensor numbers, str plan, str estimator, bool with_metrics"
)

SCHEMAS = {
    "advantages": (
        "(Tensor rewards, Tensor? boundaries, SymInt samples, Tensor eps, str estimator, str backend) -> Tensor"
    ),
    "forward": f"({_INPUTS}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    "forward_grad": f"({_INPUTS}, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "backward": "(Tensor current_logps, Tensor divisor, Tensor slope, Tensor upstream, str backend) -> Tensor",
}


def _results(*arguments: Any) -> tuple[torch.Tensor, ...]:
    call = LossCall(*arguments)
    current = call.current_logps
    loss, policy_loss, kl = (current.new_empty((), dtype=call.dtype) for _ in range(3))
    metrics = current.new_empty((len(METRICS) if call.with_metrics else 0,), dtype=torch.float32)
    return loss, policy_loss, kl, metrics


def _results_and_slope(*arguments: Any) -> tuple[torch.Tensor, ...]:
    call = LossCall(*arguments)
    current = call.current_logps
    return (
        *_results(*arguments),
        current.new_empty((), dtype=call.dtype),
        current.new_empty(current.shape, dtype=call.dtype),
    )


FAKES = {
    "advantages": lambda rewards, *_: rewards.new_empty(rewards.shape, dtype=compute_dtype(rewards.dtype)),
    "forward": _results,
    "forward_grad": _results_and_slope,
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
        triton_backend("rl_kernels.grpo_loss.backends.triton.backend"),
        Backend("native", "rl_kernels.grpo_loss.backends.native.backend", {"cpu": INVARIANT, "cuda": INVARIANT}),
    ),
    describe=describe,
)

ops = torchlib.define(OPERATOR)
