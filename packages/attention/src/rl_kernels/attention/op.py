"""The registration of det_attention with the registry and torch: schemas, fake kernels, backends, their promises.

The arguments of the raw ops are those of ``inputs.Inputs``. ``forward`` returns out and lse, ``output`` out alone. lse
is FP32, ``[B, H, T]`` or ``[H, total]``. ``backward`` takes the out and lse of ``forward`` and the gradient of out. dk
and dv are empty if ``needs_keys`` is False, dq is if ``needs_queries`` is, and dsinks is empty without sinks.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.attention.inputs import Inputs
from rl_kernels.core import batched
from rl_kernels.core.constants import STEP
from rl_kernels.core.cuda.where import cuda_backend
from rl_kernels.core.operator import INVARIANT, REPEATABLE, Backend, Call, Operator
from rl_kernels.core.torchlib.ops import define
from rl_kernels.core.triton_lib.launch import triton_backend

WIDEST = 256
"""The largest head size of the GPU's kernels: two accumulators this wide fill the registers of a multiprocessor."""
LARGEST_GROUP = 64
"""The most query heads that share a KV head in the CUDA C++ kernels."""
BLOCK = 64
"""Rows and keys of the CPU products that ``explain`` describes."""
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? k_start, "
    "Tensor? seqused_q, Tensor? seqused_k, Tensor? block_table, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float scale, int left, int right, float softcap"
)
SCHEMAS = {
    "forward": f"({_INPUTS}, str backend) -> (Tensor, Tensor)",
    "output": f"({_INPUTS}, str backend) -> Tensor",
    "backward": (
        f"({_INPUTS}, Tensor out, Tensor lse, Tensor grad, bool needs_queries, bool needs_keys, str backend)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
}


def _fake_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = Inputs(*args)
    return _fake_output(*args), inputs.q.new_empty(inputs.lse_shape(), dtype=torch.float32)


def _fake_output(*args: Any) -> torch.Tensor:
    inputs = Inputs(*args)
    return inputs.q.new_empty(inputs.out_shape())


def _fake_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    inputs, (needs_queries, needs_keys) = Inputs(*args[:-5]), args[-2:]
    dk, dv = (value.new_empty(value.shape if needs_keys else 0) for value in (inputs.k, inputs.v))
    dsinks = (
        inputs.q.new_empty(0, dtype=torch.float32)
        if inputs.sinks is None
        else inputs.sinks.new_empty(inputs.sinks.shape)
    )
    return inputs.q.new_empty(inputs.q.shape if needs_queries else 0), dk, dv, dsinks


FAKES = {"forward": _fake_forward, "output": _fake_output, "backward": _fake_backward}


def describe(q: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None, **_: object) -> Call:
    """Describe a call of the public function to the dispatcher."""
    size = q.shape[-1] if v is None else max(q.shape[-1], v.shape[-1])
    heads, kv_heads = q.shape[-2], q.shape[-2] if k is None else k.shape[-2]
    return Call.of(q, H=heads, Hkv=kv_heads, D=size)


def _limits(call: Call) -> str | None:
    size = call.traits.get("D", 0)
    return None if size <= WIDEST else f"takes head sizes up to {WIDEST}, and D is {size}"


def _cuda_limits(call: Call) -> str | None:
    if call.dtype == torch.float32:
        return "multiplies BF16 and FP16; IEEE products of FP32 are for triton"
    heads, kv_heads = (call.traits.get(name, 0) for name in ("H", "Hkv"))
    if heads > LARGEST_GROUP * kv_heads:
        return f"takes up to {LARGEST_GROUP} query heads for each KV head, and there are {heads} for {kv_heads}"
    return _limits(call)


def _note(call: Call) -> str | None:
    """Return the note of ``explain`` on native: how the scores of a block of keys are computed."""
    if call.device.type != "cpu" or call.dtype == torch.float64 or "D" not in call.traits:
        return None
    size = call.traits["D"] + -call.traits["D"] % STEP
    return batched.note(BLOCK, size, BLOCK)


OPERATOR = Operator(
    name="det_attention",
    package="rl_kernels.attention",
    summary="attention whose bits are the same in prefill, chunks and decode, in any batch",
    shape=("B", "T", "S", "H", "Hkv", "D"),
    rows=frozenset({"B", "T", "S"}),
    schemas=SCHEMAS,
    fakes=FAKES,
    backends=(
        cuda_backend(
            "cuda-sm90", "rl_kernels.attention.backends.cuda_sm90.backend", archs="sm_90", limits=_cuda_limits
        ),
        triton_backend("rl_kernels.attention.backends.triton.backend", _limits),
        Backend(
            "native",
            "rl_kernels.attention.backends.native.backend",
            {"cpu": INVARIANT, "cuda": REPEATABLE},
            note=_note,
        ),
    ),
    describe=describe,
    canary="rl_kernels.attention.canary",
)

ops = define(OPERATOR)
