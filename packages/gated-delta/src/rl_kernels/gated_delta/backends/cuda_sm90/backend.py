"""The backend ``cuda-sm90`` of gated_delta_rule: CUDA C++ for heads of 128 numbers of 16 bits.

The kernels state the order of the sums, which is the contract of this backend: ``prepare_sm90.cu`` and ``scan_sm90.cu``
for any number of tokens, ``decode_sm90.cu`` for one token of each sequence. Gradients are those of ``triton``.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.cuda.program import Program
from rl_kernels.gated_delta.backends.cuda_sm90 import decode, prefill
from rl_kernels.gated_delta.backends.cuda_sm90.prefill import NO_CACHE, Plan
from rl_kernels.gated_delta.inputs import COUNT, Inputs
from rl_kernels.gated_delta.op import OPERATOR
from rl_kernels.gated_delta.places import counts_of

__all__ = ["backward", "continued", "forward", "programs"]


@prepared
def forward(*arguments: Any) -> Launches:
    """Return the output ``[B, T, Hv, Dv]``, and the states after the last tokens, empty unless they are asked for."""
    inputs, with_state = Inputs(*arguments[:COUNT]), arguments[COUNT]
    plan, shape = Plan(inputs, is_cached=False), inputs.state_shape

    def launch(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        v, initial = args[2], args[5]
        state = v.new_empty(shape if with_state else 0, dtype=torch.float32)
        if plan.is_empty:
            if with_state:
                state.zero_() if initial is None else state.copy_(initial)
            return v.new_zeros(v.shape), state
        return plan.run(args, state if with_state else None, NO_CACHE), state

    return launch


@prepared
def continued(*arguments: Any) -> Launches:
    """Return the output ``[B, T, Hv, Dv]`` of sequences that go on from a cache, and write to the cache."""
    inputs = Inputs(*arguments[:COUNT])
    if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None and inputs.start is None:
        return decode.one_token(inputs)
    plan = Plan(inputs, is_cached=True)

    def launch(*args: Any) -> torch.Tensor:
        v, bounds, start = args[2], args[6], args[7]
        if plan.is_empty:
            return v.new_zeros(v.shape)
        cache = args[COUNT:]
        out = plan.run(args, cache[0], cache)
        cache[-1].add_(counts_of(plan.tokens, bounds, start))
        return out

    return launch


@prepared
def backward(*arguments: Any) -> Launches:
    """Return the gradients of q, k, v, g, beta, and of the initial state, as ``triton`` does."""
    launches: Launches = OPERATOR.backend("triton").load().backward.prepare(*arguments)
    return launches


def programs(arch: str) -> list[Program]:
    """Return the programs to compile for a target: all of them for ``sm_90a``, none for others."""
    return [*prefill.programs(arch), *decode.programs(arch)]
