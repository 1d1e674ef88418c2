"""Registry entry of grpo_loss: torch schemas, fake kernels, backends and their promises.

Arguments of the raw ops:

- All tensors are on one device, except ``eps`` (no dims) and ``numbers`` (``call.Numbers``): these are FP64 on the CPU,
  so that one graph serves all their values.
- Log-probabilities and the mask are ``[B, T]`` of any strides. The mask has any dtype; every nonzero value is active.
- A loss takes either ``rewards[B]`` with groups, or ``advantages``, ``[B]`` or ``[B, T]``. Groups are
  ``boundaries[G + 1]``, int64, clamped to ``[0, B]``; without boundaries every group has the size ``samples``.
- ``old_logps`` None means a ratio of 1, ``ref_logps`` None means no KL.
- ``rollout_ratio`` is ``[B]`` or ``[B, T]``; ``normalizer`` has no dims.
- With ``cu_seqlens[B + 1]``, tensors that are otherwise ``[B, T]`` are ``[total]``, per-token advantages and rollout
  ratios are ``[1, total]``, and T is ``max_seqlen``.
- ``plan`` and ``estimator`` are the strings of ``call.Formula`` and ``call.Estimator``.

Results are FP32 (FP64 for FP64 inputs); metrics are FP32, and empty if they are not requested.

``forward_grad`` also returns ``divisor``, by which the sums over the batch are divided, and ``slope``, of the shape of
current_logps: divisor times the gradient of current_logps for an upstream gradient of 1. It is -0 at masked tokens and
nowhere else. ``backward`` scales the slope, sets masked tokens to +0 for any upstream gradient, and casts to the dtype
of current_logps; it reads no value of current_logps. ``backward_inplace`` writes that gradient over the slope, which is
contiguous and in the dtype of current_logps.

``sums`` and ``combine`` are ``forward`` in two steps, for a batch that is spread over ranks: ``sums`` are ``[3, B]``,
policy term, KL and active tokens of each sequence, with metrics ``[14, B]``. Any sequences may be put side by side, in
the order of the batch; ``combine`` then adds them as ``forward`` does. Its ``length`` is T.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.torchlib.ops import define
from rl_kernels.core.triton_lib.launch import triton_backend
from rl_kernels.grpo_loss.call import SUMS, LossCall
from rl_kernels.grpo_loss.outputs import METRICS

_INPUTS = (
    "Tensor current_logps, Tensor? old_logps, Tensor? ref_logps, Tensor? rewards, Tensor? boundaries, SymInt samples, "
    "Tensor? advantages, Tensor mask, Tensor? rollout_ratio, Tensor? entropy, Tensor? normalizer, Tensor? cu_seqlens, "
    "SymInt max_seqlen, Tensor numbers, str plan, str estimator, bool with_metrics"
)

SCHEMAS = {
    "advantages": (
        "(Tensor rewards, Tensor? boundaries, SymInt samples, Tensor eps, str estimator, str backend) -> Tensor"
    ),
    "forward": f"({_INPUTS}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    "forward_grad": f"({_INPUTS}, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "sums": f"({_INPUTS}, str backend) -> Tensor",
    "sums_grad": f"({_INPUTS}, str backend) -> (Tensor, Tensor)",
    "combine": (
        "(Tensor sums, Tensor? normalizer, SymInt length, Tensor numbers, str plan, str backend)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "backward": "(Tensor current_logps, Tensor divisor, Tensor slope, Tensor upstream, str backend) -> Tensor",
    "backward_inplace": "(Tensor(a!) slope, Tensor divisor, Tensor upstream, str backend) -> ()",
}


def _loss(*arguments: Any, has_slope: bool, has_total: bool) -> Any:
    call = LossCall(*arguments)
    current, count = call.current_logps, len(METRICS) if call.with_metrics else 0
    slope = current.new_empty(current.shape, dtype=call.dtype)
    if not has_total:
        sums = current.new_empty((SUMS + count, call.batch), dtype=call.dtype)
        return (sums, slope) if has_slope else sums
    loss, policy_loss, kl, divisor = (current.new_empty((), dtype=call.dtype) for _ in range(4))
    results = loss, policy_loss, kl, current.new_empty((count,), dtype=torch.float32)
    return (*results, divisor, slope) if has_slope else results


def _combined(sums: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    loss, policy_loss, kl, divisor = (sums.new_empty(()) for _ in range(4))
    return loss, policy_loss, kl, sums.new_empty((sums.shape[0] - SUMS,), dtype=torch.float32), divisor


FAKES: dict[str, Callable[..., Any]] = {
    "advantages": lambda rewards, *_: rewards.new_empty(rewards.shape, dtype=compute_dtype(rewards.dtype)),
    "forward": partial(_loss, has_slope=False, has_total=True),
    "forward_grad": partial(_loss, has_slope=True, has_total=True),
    "sums": partial(_loss, has_slope=False, has_total=False),
    "sums_grad": partial(_loss, has_slope=True, has_total=False),
    "combine": _combined,
    "backward": lambda current_logps, *_: current_logps.new_empty(current_logps.shape),
    "backward_inplace": lambda slope, divisor, upstream: None,
}


def describe(current_logps: torch.Tensor, *_: object, **__: object) -> Call:
    """Return the device and dtype of the first tensor, by which the dispatcher chooses a backend."""
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
    functions=("group_advantages", "grpo_loss_from_advantages", "sequence_losses"),
    canary="rl_kernels.grpo_loss.canary",
)

ops = define(OPERATOR)
