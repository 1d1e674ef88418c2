"""Registry entry of fused_logp: torch schemas, fake kernels, backends and their promises.

Arguments of the raw ops: logits ``[N, V]`` of any strides; ids ``[N]``; temperature ``[]`` or ``[N]`` in the compute
dtype (FP32, or FP64 for FP64 logits); row_indices int64 in ``[0, N)``; min_logit ``[N]`` in the compute dtype. Results:
logp, logsumexp and entropy ``[N]``, and norm ``[N, 2]``, all in the compute dtype. norm holds the largest raw logit of
each row and the log of the sum of e^(z - max z); backward computes the gradient from these two. Where the target is
below min_logit, its grad_logp counts as 0.
"""

from __future__ import annotations

import torch

from rl_kernels.core.cuda.where import cuda_backend
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.torchlib.ops import define
from rl_kernels.core.triton_lib.launch import triton_backend

COLUMNS = (1 << 31) - (1 << 15)
"""Upper limit of V in the CUDA kernels: their 32-bit column counter runs a little past the end of a row."""
_INPUTS = (
    "Tensor logits, Tensor target_ids, Tensor temperature, int? ignore_index, Tensor? row_indices, Tensor? min_logit"
)
_SAVED = "Tensor norm, Tensor? entropy, Tensor? grad_logp, Tensor? grad_logsumexp, Tensor? grad_entropy"

SCHEMAS = {
    "forward": f"({_INPUTS}, str backend) -> (Tensor, Tensor)",
    "forward_stats": f"({_INPUTS}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    "backward": f"({_INPUTS}, {_SAVED}, str backend) -> Tensor",
    "backward_inplace": f"({_INPUTS.replace('Tensor logits', 'Tensor(a!) logits')}, {_SAVED}, str backend) -> ()",
}


def _rows(logits: torch.Tensor, *shape: int) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], *shape, dtype=compute_dtype(logits.dtype))


FAKES = {
    "forward": lambda logits, *_: (_rows(logits), _rows(logits, 2)),
    "forward_stats": lambda logits, *_: (_rows(logits), _rows(logits), _rows(logits), _rows(logits, 2)),
    "backward": lambda logits, *_: logits.new_empty(logits.shape),
    "backward_inplace": lambda *_: None,
}


def describe(logits: torch.Tensor, *_: object, **__: object) -> Call:
    """Return device, dtype and sizes of a call of the public function, by which the dispatcher chooses a backend."""
    return Call.of(logits, V=logits.shape[-1])


def _columns(call: Call) -> str | None:
    vocab = call.traits.get("V", 0)
    return None if vocab < COLUMNS else f"counts columns in 32 bits: needs V < {COLUMNS}, got {vocab}"


OPERATOR = Operator(
    name="fused_logp",
    aliases=("logp",),
    package="rl_kernels.fused_logp",
    summary="log-probability, logsumexp and entropy of selected tokens, from logits",
    shape=("N", "V"),
    rows=frozenset({"N"}),
    schemas=SCHEMAS,
    fakes=FAKES,
    backends=(
        cuda_backend("cuda-generic", "rl_kernels.fused_logp.backends.cuda.backend", archs="sm_80+", limits=_columns),
        triton_backend("rl_kernels.fused_logp.backends.triton.backend"),
        Backend("native", "rl_kernels.fused_logp.backends.native", {"cpu": INVARIANT, "cuda": INVARIANT}),
    ),
    describe=describe,
    canary="rl_kernels.fused_logp.canary",
)

ops = define(OPERATOR)
