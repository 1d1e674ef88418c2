"""The backend ``cuda-sm90`` of linear_logp: the forward pass in CUDA C++, the backward pass in Triton.

``kernels/linear_logp_sm90.cu`` says in which order is summed. A logit has the bits that it has in Triton: both are
canonical chains over D, so the gradients are those of the very probabilities of this forward pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.tensor_map import tensor_map
from rl_kernels.core.gpu import processors
from rl_kernels.linear_logp.inputs import Inputs, slices

CODES = {torch.bfloat16: 1, torch.float16: 2}
"""DTYPE of the kernel."""
ARGS = "(PPPPPPPPqiiiiifi)"
"""``struct Args``."""
BLOCK, UNIT = 256, 4
"""Columns of a block, and blocks that one part holds where there are enough of them to fill the GPU."""
HEIGHT, INNER, SWIZZLE, CHUNK = 64, 64, 128, 16
"""Rows of a consumer, terms of D of a stage, bytes of its swizzled rows, and what addresses are multiples of."""
WARPGROUP, WARP, ALIGNMENT = 128, 32, 1024
SHARED = 227 * 1024
"""Bytes of shared memory that a block may have."""
MOST_ROWS = 16384
"""Rows whose states are kept at a time: of more, there would be no bound on them."""
TOGETHER = 8
"""Rows of tiles that are worked on together."""


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp), each ``[N]``."""
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index)
    logp, lse, _ = _statistics(inputs, entropy=False)
    return logp, lse


def forward_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy), each ``[N]``."""
    return _statistics(Inputs(hidden, weight, target_ids, bias, temperature, ignore_index), entropy=True)


def backward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dhidden, dweight, dbias), empty where not needed, as ``triton_backend.backward``."""
    # Here, because kernels are compiled where there is no Triton.
    from rl_kernels.linear_logp import triton_backend

    return triton_backend.backward(*args)


def backward_main_grad(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Add dweight to ``main_grad``, the last argument, and return (dhidden, dbias), empty where not needed."""
    from rl_kernels.linear_logp import triton_backend

    return triton_backend.backward_main_grad(*args)


def programs(arch: str) -> list[Program]:
    """Return what is compiled for a target: all of it for ``sm_90a``."""
    if arch != "sm_90a":
        return []
    return [
        program(dtype, groups, entropy=entropy) for dtype in CODES for groups in (1, 2) for entropy in (False, True)
    ]


@functools.cache
def program(dtype: torch.dtype, groups: int, *, entropy: bool) -> Program:
    """Return the kernels for tiles of so many times 64 rows."""
    defines = {"DTYPE": CODES[dtype], "ENTROPY": int(entropy), "GROUPS": groups, "STAGES": _stages(groups)}
    return Program("rl_kernels.linear_logp", "linear_logp_sm90.cu", "sm_90a", tuple(defines.items()))


def _stages(groups: int) -> int:
    return (SHARED - ALIGNMENT) // _stage(groups)


def _stage(groups: int) -> int:
    return (groups * HEIGHT + BLOCK) * SWIZZLE


def _statistics(inputs: Inputs, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = len(inputs.hidden)
    logp, lse = (inputs.hidden.new_empty(count, dtype=torch.float32) for _ in range(2))
    row_entropy = inputs.hidden.new_empty(count, dtype=torch.float32) if entropy else lse
    weight = _copyable(inputs.weight)
    for rows in slices(count, MOST_ROWS):
        block = inputs.block(rows)._replace(weight=weight)
        _launch(block, logp[rows], lse[rows], row_entropy[rows], entropy=entropy)
    return logp, lse, row_entropy


def _launch(inputs: Inputs, logp: torch.Tensor, lse: torch.Tensor, row_entropy: torch.Tensor, *, entropy: bool) -> None:
    hidden, weight = _copyable(inputs.hidden), inputs.weight
    (count, size), vocab = hidden.shape, len(weight)
    groups = 1 if count <= HEIGHT else 2
    units, down, chip = -(-vocab // (BLOCK * UNIT)), -(-count // (groups * HEIGHT)), processors(hidden.get_device())
    # One block a part where whole units would leave multiprocessors idle.
    blocks = UNIT if down * units >= 8 * chip else 1
    parts = -(-vocab // (BLOCK * blocks))
    states = hidden.new_empty((parts, 3, count), dtype=torch.float32)
    chosen = hidden.new_empty(count, dtype=torch.float32)
    ids = inputs.target_ids.to(torch.int64).contiguous()
    per_row = inputs.temperature.ndim > 0
    temperatures = inputs.temperature.contiguous() if per_row else None
    bias = None if inputs.bias is None else inputs.bias.contiguous()
    arguments = (
        *(bias, temperatures, ids, chosen, states, logp, lse, row_entropy),
        *(inputs.ignore_index or 0, count, vocab, size, TOGETHER, blocks),
        *(1.0 if per_row else float(inputs.temperature), inputs.ignore_index is not None),
    )
    made = program(hidden.dtype, groups, entropy=entropy)
    kernel(made, "states", f"TT{ARGS}", hidden.device).launch(
        min(down * parts, chip),
        (groups + 1) * WARPGROUP,
        tensor_map(hidden, (groups * HEIGHT, INNER), swizzle=SWIZZLE),
        tensor_map(weight, (BLOCK, INNER), swizzle=SWIZZLE),
        *arguments,
        shared=_stages(groups) * _stage(groups) + ALIGNMENT,
    )
    kernel(made, "finish", ARGS, hidden.device).launch(-(-count * WARP // 256), 256, *arguments)


def _copyable(x: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose rows begin at multiples of 16 bytes, as the copy engine wants them: itself, or a copy."""
    size = x.element_size()
    fits = x.stride(1) == 1 and x.stride(0) * size % CHUNK == 0 and x.stride(0) >= x.shape[1]
    return x if fits and x.data_ptr() % CHUNK == 0 else x.contiguous().clone()
