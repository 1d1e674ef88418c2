"""The registration of gated_delta_rule with the registry and torch: schemas, fake kernels, backends, their promises.

The arguments of the raw ops are those of ``inputs.Inputs``. ``forward`` returns the output ``[B, T, Hv, Dv]`` and, if
``with_state``, the states after the last tokens ``[sequences, Hv, Dk, Dv]``, else an empty tensor. ``continued`` goes
on from the tensors of a ``DeltaCache``, and writes to them. ``backward`` takes the gradients of the output and of the
states, and returns those of q, k, v, g, beta and the initial state, the last one empty if ``needs_state`` is False.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core import batched
from rl_kernels.core.cuda.where import cuda_backend
from rl_kernels.core.operator import INVARIANT, REPEATABLE, Backend, Call, Operator
from rl_kernels.core.torchlib.ops import define
from rl_kernels.core.triton_lib.launch import triton_backend
from rl_kernels.core.triton_lib.launch import why_not as triton_why_not
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.inputs import COUNT, Inputs, state_dtype

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, Tensor? start, "
    "float scale, bool normalize_qk"
)
_CACHE = (
    "Tensor(a!) state, Tensor(b!) keys, Tensor(c!) residuals, Tensor(d!) decays, Tensor(e!) inverse, Tensor(f!) lengths"
)
SCHEMAS = {
    "forward": f"({_INPUTS}, bool with_state, str backend) -> (Tensor, Tensor)",
    "continued": f"({_INPUTS}, {_CACHE}, str backend) -> Tensor",
    "backward": (
        f"({_INPUTS}, Tensor grad, Tensor? grad_state, bool needs_state, str backend)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
}


def _fake_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, with_state = Inputs(*args[:COUNT]), args[COUNT]
    state = inputs.v.new_empty(inputs.state_shape if with_state else 0, dtype=state_dtype(inputs.q.dtype))
    return inputs.v.new_empty(inputs.v.shape), state


def _fake_continued(*args: Any) -> torch.Tensor:
    return args[2].new_empty(args[2].shape)


def _fake_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    inputs, needs_state = Inputs(*args[:COUNT]), args[-1]
    state = inputs.v.new_empty(inputs.state_shape if needs_state else 0, dtype=state_dtype(inputs.q.dtype))
    return *(x.new_empty(x.shape) for x in inputs[:5]), state


FAKES = {"forward": _fake_forward, "continued": _fake_continued, "backward": _fake_backward}


def describe(q: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None, **_: object) -> Call:
    """Describe a call of the public function to the dispatcher."""
    values = q if v is None else v
    return Call.of(q, Hk=q.shape[2], Hv=values.shape[2], Dk=q.shape[3], Dv=values.shape[3])


WIDEST = 128
"""Largest Dk of FP32 keys in Triton: a chunk of wider ones does not fit into shared memory."""


def _limits(call: Call) -> str | None:
    size = call.traits.get("Dk", 0)
    if call.dtype == torch.float32 and size > WIDEST:
        return f"takes FP32 keys of up to {WIDEST} numbers, and Dk is {size}"
    return None


HEAD_SIZE, MOST_HEADS = 128, 511
"""Dk and Dv of the CUDA C++ kernels, and the most value heads: a decode step counts their blocks in the bits of
``lengths`` above ``constants.MOST_TOKENS``."""


def _cuda_limits(call: Call) -> str | None:
    if call.dtype == torch.float32:
        return "takes BF16 and FP16"
    sizes = [f"{name} = {call.traits[name]}" for name in ("Dk", "Dv") if call.traits.get(name, HEAD_SIZE) != HEAD_SIZE]
    if sizes:
        return f"takes heads of {HEAD_SIZE} numbers, and {sizes[0]}"
    if call.traits.get("Hv", 0) > MOST_HEADS:
        return f"takes up to {MOST_HEADS} value heads, and Hv is {call.traits['Hv']}"
    # Of gradients a part is in Triton.
    return triton_why_not(call)


def _note(call: Call) -> str | None:
    """Return the note of ``explain`` on native: how products over the head size are computed."""
    if call.device.type != "cpu" or call.dtype == torch.float64 or "Dk" not in call.traits:
        return None
    return batched.note(CHUNK, call.traits["Dk"], call.traits["Dv"])


OPERATOR = Operator(
    name="gated_delta_rule",
    package="rl_kernels.gated_delta",
    summary="the gated delta rule, whose bits are the same in prefill, chunks and decode, in any batch",
    shape=("B", "T", "Hk", "Hv", "Dk", "Dv"),
    rows=frozenset({"B", "T"}),
    schemas=SCHEMAS,
    fakes=FAKES,
    backends=(
        cuda_backend(
            "cuda-sm90", "rl_kernels.gated_delta.backends.cuda_sm90.backend", archs="sm_90", limits=_cuda_limits
        ),
        triton_backend("rl_kernels.gated_delta.backends.triton.backend", _limits),
        Backend(
            "native",
            "rl_kernels.gated_delta.backends.native",
            {"cpu": INVARIANT, "cuda": REPEATABLE},
            note=_note,
        ),
    ),
    describe=describe,
    canary="rl_kernels.gated_delta.canary",
)

ops = define(OPERATOR)
