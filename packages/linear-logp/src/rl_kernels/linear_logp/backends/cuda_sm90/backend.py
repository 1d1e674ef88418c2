"""The backend ``cuda-sm90`` of linear_logp: tiles of logits in CUDA C++, forward and backward.

``linear_logp_sm90.cu`` defines the reduction order of the forward pass. Backward recomputes the logits with the same
bits, so the gradients belong to exactly the probabilities of the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.linear_logp.backends.cuda_sm90.tiles import (
    BACKWARD,
    BLOCK,
    CODES,
    FORWARD,
    HEIGHT,
    Cut,
    Operands,
    copyable,
    program,
)
from rl_kernels.linear_logp.inputs import Inputs, slices

ARGS = "({}PPPPPPi)"
"""Layout of ``struct Args``; ``{}`` is the layout of ``struct Inputs``, its first part."""
WARP = 32
MOST_ROWS = 16384
"""Row limit of a launch; it bounds the memory of the softmax states."""


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    cap: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logp, norm), ``[N]`` and ``[N, 2]``."""
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap)
    logp, _, _, norm = _statistics(inputs, entropy=False)
    return logp, norm


def forward_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    cap: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy, norm), the first three ``[N]``, the last ``[N, 2]``."""
    return _statistics(Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap), entropy=True)


def backward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dhidden, dweight, dbias), each empty if not needed, as ``products.backward`` does."""
    # Imported here: the CUDA kernels are also compiled on machines without Triton.
    from rl_kernels.linear_logp.backends.cuda_sm90 import backward as cuda_backward

    return cuda_backward.backward(*args)


def backward_main_grad(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Add dweight to ``main_grad``, the last argument, and return (dhidden, dbias), each empty if not needed."""
    dhidden, _, dbias = backward(*args)
    return dhidden, dbias


def programs(arch: str) -> list[Program]:
    """Return the programs compiled for a target: all of them for ``sm_90a``, none for others."""
    if arch != "sm_90a":
        return []
    return [
        program(file, dtype, cut, entropy=entropy, capped=capped)
        for file in (FORWARD, BACKWARD)
        for dtype in CODES
        for cut in map(Cut.of, (HEIGHT, 2 * HEIGHT))
        for entropy in (False, True)
        for capped in (False, True)
    ]


def _statistics(inputs: Inputs, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy, norm); logsumexp and entropy are written only with ``entropy``."""
    hidden, count = inputs.hidden, len(inputs.hidden)
    logp, norm = hidden.new_empty(count, dtype=torch.float32), hidden.new_empty((count, 2), dtype=torch.float32)
    lse, row_entropy = (hidden.new_empty(count, dtype=torch.float32) if entropy else logp for _ in range(2))
    weight = copyable(inputs.weight)
    for rows in slices(count, MOST_ROWS):
        block = inputs.block(rows)._replace(weight=weight)
        _launch(block, logp[rows], norm[rows], lse[rows], row_entropy[rows], entropy=entropy)
    return logp, lse, row_entropy, norm


def _launch(inputs: Inputs, *results: torch.Tensor, entropy: bool) -> None:
    hidden = copyable(inputs.hidden)
    (count, vocab), device = (len(hidden), len(inputs.weight)), hidden.get_device()
    operands = Operands.of(inputs, hidden)
    cut = operands.cut
    blocks = cut.blocks(count, vocab, device)
    parts = -(-vocab // (BLOCK * blocks))
    states = hidden.new_empty((parts, 3, count), dtype=torch.float32)
    chosen = hidden.new_empty(count, dtype=torch.float32)
    arguments = (*operands.arguments, chosen, states, *results, blocks)
    made = program(FORWARD, hidden.dtype, cut, entropy=entropy, capped=inputs.cap is not None)
    form = ARGS.format(operands.form)
    kernel(made, "states", f"TT{form}", hidden.device).launch(
        cut.grid(count, parts, device),
        cut.threads,
        *operands.maps,
        *arguments,
        shared=cut.shared(FORWARD),
    )
    kernel(made, "finish", form, hidden.device).launch(-(-count * WARP // 256), 256, *arguments)
