"""Registry entry of linear_logp: torch schemas, fake kernels, backends and their promises.

Arguments of the raw ops: hidden ``[N, D]``, weight ``[V, D]`` and bias ``[V]``, all of one dtype and of any strides;
target_ids ``[N]``; temperature ``[]`` or ``[N]`` in the compute dtype (FP32, or FP64 for FP64 inputs); cap, the numbers
of ``inputs.Cap`` as FP64 on the CPU, or None if logits are not capped. Results: logp, logsumexp and entropy ``[N]`` and
norm ``[N, 2]``, all in the compute dtype. norm holds the largest logit of each row (capped, before the temperature) and
the log of the sum of e^(z - max z); backward computes the gradient from these two. ``needed`` lists whether the
gradients of hidden, weight and bias are needed; one that is not comes back empty. ``backward_main_grad`` adds the
gradient of the weight to ``main_grad[V, D]``, FP32, and returns the gradients of hidden and bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_kernels.core import torchlib
from rl_kernels.core.cuda.where import cuda_backend
from rl_kernels.core.operator import INVARIANT, REPEATABLE, Backend, Call, Operator
from rl_kernels.core.rowwise import compute_dtype
from rl_kernels.core.triton_lib.launch import triton_backend

_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor target_ids, Tensor? bias, Tensor temperature, int? ignore_index, Tensor? cap"
)
_SAVED = "Tensor norm, Tensor? entropy, Tensor? grad_logp, Tensor? grad_logsumexp, Tensor? grad_entropy"
_BACKWARD = f"{_INPUTS}, {_SAVED}, int workspace_mib, bool[3] needed"

SCHEMAS = {
    "forward": f"({_INPUTS}, str backend) -> (Tensor, Tensor)",
    "forward_stats": f"({_INPUTS}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    "backward": f"({_BACKWARD}, str backend) -> (Tensor, Tensor, Tensor)",
    "backward_main_grad": f"({_BACKWARD}, Tensor(a!) main_grad, str backend) -> (Tensor, Tensor)",
}


def _rows(hidden: torch.Tensor, *shape: int) -> torch.Tensor:
    return hidden.new_empty(hidden.shape[0], *shape, dtype=compute_dtype(hidden.dtype))


def _gradients(
    hidden: torch.Tensor, weight: torch.Tensor, *others: Any, needed: Sequence[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    dhidden, dweight, dbias = (
        hidden.new_empty(shape if wanted else 0) for shape, wanted in zip(shapes, needed, strict=True)
    )
    return dhidden, dweight, dbias


FAKES = {
    "forward": lambda hidden, *_: (_rows(hidden), _rows(hidden, 2)),
    "forward_stats": lambda hidden, *_: (_rows(hidden), _rows(hidden), _rows(hidden), _rows(hidden, 2)),
    "backward": lambda *args: _gradients(*args[:-1], needed=args[-1]),
    "backward_main_grad": lambda *args: _gradients(*args[:-2], needed=args[-2])[::2],
}


def describe(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **_: object,
) -> Call:
    """Return what the dispatcher looks at in a call of the public function."""
    return Call.of(hidden, D=hidden.shape[-1], V=lm_head_weight.shape[0], bias=bias is not None)


PER_CHUNK = 8
"""16-bit numbers in 16 bytes."""
_TRITON = triton_backend("rl_kernels.linear_logp.backends.triton.backend")


def _limits(call: Call) -> str | None:
    if call.dtype == torch.float32:
        return "multiplies BF16 and FP16; IEEE products of FP32 are for triton"
    size = call.traits.get("D", 0)
    if not size or size % PER_CHUNK:
        return f"TMA needs rows that are multiples of 16 bytes, and D is {size}"
    reason = _TRITON.why_not(call)
    return reason and f"the products of its backward pass are in Triton: {reason}"


OPERATOR = Operator(
    name="linear_logp",
    package="rl_kernels.linear_logp",
    summary="log-probability, logsumexp and entropy of selected tokens, from hidden states, without the logits",
    shape=("N", "D", "V"),
    rows=frozenset({"N"}),
    schemas=SCHEMAS,
    fakes=FAKES,
    backends=(
        cuda_backend("cuda-sm90", "rl_kernels.linear_logp.backends.cuda_sm90.backend", archs="sm_90", limits=_limits),
        _TRITON,
        Backend("native", "rl_kernels.linear_logp.backends.native", {"cpu": INVARIANT, "cuda": REPEATABLE}),
    ),
    describe=describe,
)

ops = torchlib.define(OPERATOR)
