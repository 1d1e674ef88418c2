"""Registry entry of linear_logp: torch schemas, fake kernels, backends and their promises.

Arguments of the raw ops: hidden ``[N, D]``, weight ``[V, D]`` and bias ``[V]``, all of one dtype and of any strides;
target_ids ``[N]``; temperature ``[]`` or ``[N]`` in the compute dtype (FP32, or FP64 for FP64 inputs); cap, the numbers
of ``inputs.Cap`` as FP64 on the CPU, or None if logits are not capped; min_logit ``[N]`` in the compute dtype, or None.
Results: logp, logsumexp and entropy ``[N]`` and norm ``[N, 2]``, all in the compute dtype. norm holds the largest logit
of each row (capped, before the temperature) and the log of the sum of e^(z - max z); backward computes the gradient
from these two, and of a row whose target is below min_logit needs a grad_logp of 0. ``needed`` lists whether the
gradients of hidden, weight and bias are needed; one that is not comes back empty. ``backward_main_grad`` adds the
gradient of the weight to ``main_grad[V, D]`` and that of the bias to ``bias_total[V]``, which may be None, and returns
the gradients of hidden and of a bias without a total. Totals have the compute dtype; their chains are continued, or
with ``join_tokens`` chains of that many rows are added to them (``backward``).

The last result of ``forward``, ``forward_stats`` and ``states`` are logits that are kept for backward, also those below
min_logit, at most ``saved_mib`` of them (``inputs.kept_room``). Backward takes them as ``kept``; it recomputes the
others. Those of ignored rows, and of columns beyond the weight's, are not defined. With ``frees_kept`` nobody reads
them later: backward frees their memory, and leaves ``kept`` an empty tensor.

``forward_columns`` is the forward pass over the columns of each row that ``columns[N, K]``, int64, lists
(``kept_columns.py``): statistics of these alone, and their logits ``[N, K]``. Backward takes both: the latter as
``kept``.

``states`` and ``finish`` are the forward pass in two parts, between which ranks exchange states: weight and bias are a
shard that begins at column ``vocab_start`` of ``vocab_size``; ids are those of the whole vocabulary. ``states`` returns
``packed[slots k + 1, N]`` and ``finish`` takes ``gathered[ranks, slots k + 1, N]`` (``inputs``); without ``entropy``
two of its results are empty. Backward takes a shard too. With ``partial`` its gradient of hidden is the sum over the
shard, in the compute dtype.

``sample`` draws a token for each row of logits, as ``drawing`` defines. It takes ``logits[N, V]`` in FP32, contiguous
rows of the kept logits, and their norm; the numbers of ``drawing.Request``; and the dtype of the operands of which the
logits are products. It returns ids, the log-probabilities over the kept and over all entries, and min_logit, ``[N]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rl_kernels.core import products
from rl_kernels.core.constants import UNIT
from rl_kernels.core.cuda.where import cuda_backend
from rl_kernels.core.operator import INVARIANT, REPEATABLE, Backend, Call, Operator
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.torchlib.ops import define
from rl_kernels.core.triton_lib.launch import triton_backend
from rl_kernels.linear_logp.inputs import kept_room, packed_room

_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor target_ids, Tensor? bias, Tensor temperature, int? ignore_index, Tensor? cap"
)
_MASKED = f"{_INPUTS}, Tensor? min_logit"
_SAVED = "Tensor norm, Tensor? entropy, Tensor? kept, Tensor? grad_logp, Tensor? grad_logsumexp, Tensor? grad_entropy"
_SHARD = "SymInt vocab_start, SymInt vocab_size, int vocab_segments, bool partial"
_BACKWARD = (
    f"{_MASKED}, {_SAVED}, {_SHARD}, Tensor? columns, int? workspace_mib, bool[3] needed, int? join_tokens, "
    "bool frees_kept"
)
_REQUEST = "Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? limit, Tensor uniform, ScalarType dtype"
_GATHERED = "Tensor gathered, Tensor target_ids, Tensor temperature, int? ignore_index, SymInt vocab_size, bool entropy"

SCHEMAS = {
    "forward": f"({_MASKED}, int? saved_mib, str backend) -> (Tensor, Tensor, Tensor)",
    "forward_stats": f"({_MASKED}, int? saved_mib, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "forward_columns": (
        f"({_INPUTS}, Tensor columns, int? workspace_mib, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "states": (
        f"({_MASKED}, SymInt vocab_start, int slots, bool entropy, int? saved_mib, str backend) -> (Tensor, Tensor)"
    ),
    "finish": f"({_GATHERED}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    "sample": f"(Tensor logits, Tensor norm, {_REQUEST}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    "backward": f"({_BACKWARD}, str backend) -> (Tensor, Tensor, Tensor)",
    "backward_main_grad": (
        f"({_BACKWARD}, Tensor(a!)? main_grad, Tensor(b!)? bias_total, str backend) -> (Tensor, Tensor)"
    ),
}


def _rows(hidden: torch.Tensor, *shape: int) -> torch.Tensor:
    return hidden.new_empty(hidden.shape[0], *shape, dtype=compute_dtype(hidden.dtype))


def _forward(count: int, hidden: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    kept = kept_room(hidden, weight.shape[0], rest[-1])
    return (*[_rows(hidden) for _ in range(count)], _rows(hidden, 2), kept)


def _over_columns(hidden: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    *_, columns, _ = rest
    return (*[_rows(hidden) for _ in range(3)], _rows(hidden, 2), _rows(hidden, columns.shape[1]))


def _states(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *_, slots, entropy, saved_mib = rest
    return packed_room(hidden, slots, entropy=entropy)[0], kept_room(hidden, weight.shape[0], saved_mib)


def _finished(gathered: torch.Tensor, target_ids: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    count, extra = len(target_ids), len(target_ids) if rest[-1] else 0
    return tuple(gathered.new_empty(shape) for shape in (count, extra, extra, (count, 2)))


def _sampled(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    numbers = [_rows(logits) for _ in range(3)]
    return logits.new_empty(len(logits), dtype=torch.int64), *numbers


def _gradients(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    *_, is_partial, _, _, needed, _, _ = rest
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    dtypes = (compute_dtype(hidden.dtype) if is_partial else hidden.dtype, *[hidden.dtype] * 2)
    return tuple(
        hidden.new_empty(shape if is_needed else 0, dtype=dtype)
        for shape, dtype, is_needed in zip(shapes, dtypes, needed, strict=True)
    )


def _continued(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *inputs, _, bias_total = args
    dhidden, _, dbias = _gradients(*inputs)
    return dhidden, dbias if bias_total is None else dbias.new_empty(0)


FAKES: dict[str, Callable[..., Any]] = {
    "forward": partial(_forward, 1),
    "forward_stats": partial(_forward, 3),
    "forward_columns": _over_columns,
    "states": _states,
    "finish": _finished,
    "sample": _sampled,
    "backward": _gradients,
    "backward_main_grad": _continued,
}


def describe(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    *_: object,
    vocab_size: int | None = None,
    **__: object,
) -> Call:
    """Return what the dispatcher looks at in a call of the public function."""
    vocab = lm_head_weight.shape[0] if vocab_size is None else vocab_size
    return Call.of(hidden, D=hidden.shape[-1], V=vocab)


PER_CHUNK = 8
"""16-bit numbers in 16 bytes."""


def _limits(call: Call) -> str | None:
    if call.dtype == torch.float32:
        return "multiplies BF16 and FP16; IEEE products of FP32 are for triton"
    # `explain` for calls of any size gives no D.
    size = call.traits.get("D", PER_CHUNK)
    if not size or size % PER_CHUNK:
        return f"TMA needs rows that are multiples of 16 bytes, and D is {size}"
    return None


def _note(call: Call) -> str | None:
    if call.device.type != "cpu" or call.dtype == torch.float64 or not {"D", "V"} <= call.traits.keys():
        return None
    return products.note(call.traits["D"], min(call.traits["V"], UNIT), torch.float32)


OPERATOR = Operator(
    name="linear_logp",
    package="rl_kernels.linear_logp",
    summary="log-probability, logsumexp and entropy of selected tokens, from hidden states, without the logits",
    shape=("N", "D", "V"),
    rows=frozenset({"N"}),
    schemas=SCHEMAS,
    fakes=FAKES,
    backends=(
        cuda_backend(
            "cuda-sm90",
            "rl_kernels.linear_logp.backends.cuda_sm90.backend",
            archs="sm_90",
            limits=_limits,
            sources=["rl_kernels.linear_logp.backends.cuda_sm90", "rl_kernels.core.cuda.gemm"],
        ),
        triton_backend("rl_kernels.linear_logp.backends.triton.backend"),
        Backend("native", "rl_kernels.linear_logp.backends.native", {"cpu": INVARIANT, "cuda": REPEATABLE}, note=_note),
    ),
    describe=describe,
    functions=("linear_logits", "linear_logp_from_known", "linear_logp_known", "linear_logp_loss"),
    canary="rl_kernels.linear_logp.canary",
)

ops = define(OPERATOR)
