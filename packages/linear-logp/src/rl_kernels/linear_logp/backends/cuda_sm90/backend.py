"""The backend ``cuda-sm90`` of linear_logp: tiles of logits in CUDA C++, forward and backward.

``linear_logp_sm90.cu`` defines the reduction order of the forward pass. Backward recomputes the logits with the same
bits, so the gradients belong to exactly the probabilities of the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rl_kernels.core.cuda.gemm.ahead import programs_of
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.tensor_map import tensor_map
from rl_kernels.linear_logp import kept, packing
from rl_kernels.linear_logp.backends.cuda_sm90 import backward as cuda_backward
from rl_kernels.linear_logp.backends.cuda_sm90.tiles import (
    BACKWARD,
    BLOCK,
    BLOCKS,
    CODES,
    FORWARD,
    HEIGHT,
    INPUTS,
    SWIZZLE,
    Cut,
    Operands,
    copyable,
    fields,
    program,
)
from rl_kernels.linear_logp.inputs import Inputs, slices
from rl_kernels.linear_logp.vocabulary import units

ARGS = "({}PPPPPPii)"
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
    saved_mib: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, norm, kept), ``[N]``, ``[N, 2]`` and ``[N, width]``."""
    logits = kept.empty(hidden, weight.shape[0], saved_mib)
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap, kept=logits)
    logp, _, _, norm = _statistics(inputs, entropy=False)
    return logp, norm, logits


def forward_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    cap: torch.Tensor | None,
    saved_mib: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy, norm, kept), the first three ``[N]``, then ``[N, 2]`` and ``[N, width]``."""
    logits = kept.empty(hidden, weight.shape[0], saved_mib)
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap, kept=logits)
    return *_statistics(inputs, entropy=True), logits


def states(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    cap: torch.Tensor | None,
    vocab_start: int,
    slots: int,
    entropy: bool,
    saved_mib: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed states and selected logits of a shard of the vocabulary (``packing``), and its kept logits."""
    weight, logits = copyable(weight), kept.empty(hidden, weight.shape[0], saved_mib)
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap, vocab_start, kept=logits)
    packed, into, selected = packing.empty(hidden, slots, entropy=entropy)
    if weight.shape[0]:
        for rows in slices(hidden.shape[0], MOST_ROWS):
            parts, chosen = _states(inputs.block(rows), entropy=entropy)
            into[: len(parts), :, rows] = parts[:, : into.shape[1]]
            selected[rows] = chosen
    return packed, logits


def finish(
    gathered: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    vocab_size: int,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy, norm) from the packed states of all shards; two are empty if not wanted."""
    parts, chosen = packing.unpacked(gathered, target_ids, vocab_size, entropy=entropy)
    inputs = Inputs(gathered, gathered, target_ids, None, temperature, ignore_index, None, whole=vocab_size)
    logp, lse, row_entropy, norm = results = _results(chosen, entropy=entropy)
    if count := chosen.shape[0]:
        temperatures, ids, numbers = fields(inputs, count, vocab_size, 0)
        arguments = (None, temperatures, ids, None, *numbers, chosen, parts, *_ordered(results), BLOCKS, 0)
        # The merge depends on neither the dtype of the operands nor the cap.
        program_of_call = program(FORWARD, torch.bfloat16, Cut.of(count), entropy=entropy)
        _launch_finish(program_of_call, ARGS.format(INPUTS), count, gathered.device, arguments)
    return (logp, lse, row_entropy, norm) if entropy else (logp, logp.new_empty(0), logp.new_empty(0), norm)


def backward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dhidden, dweight, dbias), each empty if not needed, as ``blocks.backward`` does."""
    return cuda_backward.backward(*args)


def backward_main_grad(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue the totals, the last two arguments; return (dhidden, dbias), each empty if not needed."""
    dhidden, _, dbias = backward(*args)
    return dhidden, dbias


def programs(arch: str) -> list[Program]:
    """Return the programs compiled for a target: all of them for ``sm_90a``, none for others."""
    if arch != "sm_90a":
        return []
    return programs_of(arch) + [
        program(file, dtype, cut, entropy=entropy, capped=capped, keeps=keeps)
        for file, keeps in ((FORWARD, False), (FORWARD, True), (BACKWARD, False))
        for dtype in CODES
        for cut in map(Cut.of, (HEIGHT, 2 * HEIGHT))
        for entropy in (False, True)
        for capped in (False, True)
    ]


def _statistics(inputs: Inputs, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy, norm); logsumexp and entropy are written only with ``entropy``."""
    results = _results(inputs.hidden, entropy=entropy)
    weight = copyable(inputs.weight)
    for rows in slices(inputs.hidden.shape[0], MOST_ROWS):
        block = inputs.block(rows)._replace(weight=weight)
        formed = _form(block, [value[rows] for value in _ordered(results)], entropy=entropy)
        _launch_finish(formed.made, formed.form, block.hidden.shape[0], block.hidden.device, formed.arguments)
    return results


def _results(like: torch.Tensor, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return room for (logp, logsumexp, entropy, norm) of the rows of ``like``."""
    count = like.shape[0]
    logp, norm = like.new_empty(count, dtype=torch.float32), like.new_empty((count, 2), dtype=torch.float32)
    lse, row_entropy = (like.new_empty(count, dtype=torch.float32) if entropy else logp for _ in range(2))
    return logp, lse, row_entropy, norm


def _ordered(results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the results in the order of ``struct Args``."""
    logp, lse, row_entropy, norm = results
    return logp, norm, lse, row_entropy


def _states(inputs: Inputs, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states of each unit ``[units, 3, N]``, and the logit of each row whose id is one of the columns."""
    formed = _form(inputs, [None] * 4, entropy=entropy)
    count, parts = inputs.hidden.shape[0], formed.parts
    if formed.blocks == BLOCKS:
        return parts, formed.chosen
    merged = parts.new_empty((units(inputs.weight.shape[0]), packing.STATE, count))
    launched = kernel(formed.made, "merge_blocks", f"{formed.form}P", parts.device)
    launched.launch((-(-count // 256), merged.shape[0]), 256, *formed.arguments, merged)
    return merged, formed.chosen


class _Formed(NamedTuple):
    """States and selected logits, and what the launches that read them take."""

    parts: torch.Tensor
    chosen: torch.Tensor
    blocks: int
    made: Program
    form: str
    arguments: tuple[object, ...]


def _form(inputs: Inputs, results: Sequence[torch.Tensor | None], *, entropy: bool) -> _Formed:
    hidden = copyable(inputs.hidden)
    (count, vocab), device = (hidden.shape[0], inputs.weight.shape[0]), hidden.get_device()
    operands = Operands.of(inputs, hidden)
    cut = operands.cut
    blocks = cut.blocks(count, vocab, device)
    parts = -(-vocab // (BLOCK * blocks))
    states = hidden.new_empty((parts, packing.STATE, count), dtype=torch.float32)
    chosen = hidden.new_empty(count, dtype=torch.float32)
    kept_maps = []
    if inputs.kept is not None and inputs.kept.shape[1]:
        kept_maps = [tensor_map(inputs.kept, (HEIGHT, SWIZZLE // inputs.kept.itemsize), swizzle=SWIZZLE)]
    keeps = len(kept_maps) > 0
    arguments = (*operands.arguments, chosen, states, *results, blocks, inputs.first_kept)
    made = program(FORWARD, hidden.dtype, cut, entropy=entropy, capped=inputs.cap is not None, keeps=keeps)
    form = ARGS.format(operands.form)
    kernel(made, "states", f"TT{'T' * keeps}{form}", hidden.device).launch(
        cut.grid(count, parts, device),
        cut.threads,
        *operands.maps,
        *kept_maps,
        *arguments,
        shared=cut.shared(stores=keeps),
    )
    return _Formed(states, chosen, blocks, made, form, arguments)


def _launch_finish(made: Program, form: str, count: int, device: torch.device, arguments: Sequence[object]) -> None:
    kernel(made, "finish", form, device).launch(-(-count * WARP // 256), 256, *arguments)
