"""The backend ``cuda-sm90`` of gated_delta_rule: CUDA C++ for heads of 128 numbers of 16 bits.

The kernels state the order of the sums, which is the contract of this backend: ``prepare_sm90.cu`` and ``scan_sm90.cu``
for any number of tokens, ``decode_sm90.cu`` for one token of each sequence; ``replay_sm90.cu`` and ``reverse_sm90.cu``
for gradients, whose kernels for all chunks at once are in Triton.
"""

from __future__ import annotations

from typing import Any

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.cuda.program import Program
from rl_kernels.gated_delta import launches
from rl_kernels.gated_delta.backends.cuda_sm90 import backward as gradients
from rl_kernels.gated_delta.backends.cuda_sm90 import decode, prefill
from rl_kernels.gated_delta.backends.cuda_sm90.prefill import Plan
from rl_kernels.gated_delta.inputs import COUNT, Inputs
from rl_kernels.gated_delta.triton_lib.backward import launches_of

__all__ = ["backward", "continued", "forward", "programs"]


@prepared
def forward(*arguments: Any) -> Launches:
    """Return the output ``[B, T, Hv, Dv]``, and the states after the last tokens, empty unless they are asked for."""
    inputs, with_state = Inputs(*arguments[:COUNT]), arguments[COUNT]
    return launches.whole(Plan(inputs, is_cached=False), inputs, with_state)


@prepared
def continued(*arguments: Any) -> Launches:
    """Return the output ``[B, T, Hv, Dv]`` of sequences that go on from a cache, and write to the cache."""
    inputs = Inputs(*arguments[:COUNT])
    if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None and inputs.start is None:
        return decode.one_token(inputs)
    return launches.pieces(Plan(inputs, is_cached=True))


@prepared
def backward(*arguments: Any) -> Launches:
    """Return the gradients of q, k, v, g, beta, and of the initial state, empty unless it is asked for."""
    inputs, grad, needs_state = Inputs(*arguments[:COUNT]), arguments[COUNT], arguments[COUNT + 2]
    return launches_of(gradients.Passes(inputs), inputs, grad, needs_state)


def programs(arch: str) -> list[Program]:
    """Return the programs to compile for a target: all of them for ``sm_90a``, none for others."""
    return [*prefill.programs(arch), *gradients.programs(arch), *decode.programs(arch)]
