"""linear_logp in Triton: tiles of logits stay in registers and are reduced there to softmax states or to dz.

Reduction order, which is the contract of this backend: a logit is a canonical chain over D. The vocabulary is cut into
units of 1024 columns, a unit into blocks of 256. Each block gives a softmax state; blocks are merged in ascending
order, then units. With many rows one program takes a whole unit, with few rows one block; both give the same bits. dH
is a canonical chain over the vocabulary or each of its segments (for FP32 inputs in spans of 256 columns), dW one over
the tokens; dbias adds tiles of tokens in ascending order.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib import gemm
from rl_kernels.core.triton_lib.launch import INTERPRETED, ceil_div
from rl_kernels.core.triton_lib.schedule import processors
from rl_kernels.linear_logp import blocks, kept, packing
from rl_kernels.linear_logp.backends.triton import kernels
from rl_kernels.linear_logp.backends.triton.backward import Steps
from rl_kernels.linear_logp.backends.triton.tiles import NO_CAP, bias_of, number_or_rows, schedule_of
from rl_kernels.linear_logp.inputs import Inputs


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
    logits = kept.empty(hidden, len(weight), saved_mib)
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
    logits = kept.empty(hidden, len(weight), saved_mib)
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap, kept=logits)
    return *_statistics(inputs, entropy=True), logits


def backward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dhidden, dweight, dbias), each empty if not needed, as ``blocks.backward`` does."""
    return blocks.backward(Steps(), *args)


def backward_main_grad(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue the totals, the last two arguments; return (dhidden, dbias), each empty if not needed."""
    dhidden, _, dbias = backward(*args)
    return dhidden, dbias


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
    logits = kept.empty(hidden, len(weight), saved_mib)
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap, vocab_start, kept=logits)
    if not len(hidden) or not len(weight):
        return packing.empty(hidden, slots, entropy=entropy)[0], logits
    parts, chosen = _states(inputs, target_ids.contiguous(), number_or_rows(temperature), entropy=entropy)
    return packing.pack(hidden, slots, parts, chosen, entropy=entropy), logits


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
    results = _results(chosen, entropy=entropy)
    if len(chosen):
        ids, number = target_ids.contiguous(), number_or_rows(temperature)
        _finish(parts, chosen, ids, number, ignore_index, vocab_size, results, entropy=entropy)
    logp, lse, row_entropy, norm = results
    return (logp, lse, row_entropy, norm) if entropy else (logp, logp.new_empty(0), logp.new_empty(0), norm)


def _statistics(inputs: Inputs, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy, norm); logsumexp and entropy are written only with ``entropy``."""
    results = _results(inputs.hidden, entropy=entropy)
    if len(inputs.hidden):
        ids, temperature = inputs.target_ids.contiguous(), number_or_rows(inputs.temperature)
        parts, chosen = _states(inputs, ids, temperature, entropy=entropy)
        _finish(parts, chosen, ids, temperature, inputs.ignore_index, inputs.vocab, results, entropy=entropy)
    return results


def _results(like: torch.Tensor, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return room for (logp, logsumexp, entropy, norm) of the rows of ``like``."""
    count = len(like)
    logp, norm = like.new_empty(count, dtype=torch.float32), like.new_empty((count, 2), dtype=torch.float32)
    lse, row_entropy = (like.new_empty(count, dtype=torch.float32) if entropy else logp for _ in range(2))
    return logp, lse, row_entropy, norm


def _states(
    inputs: Inputs, ids: torch.Tensor, temperature: torch.Tensor | float, *, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states of each unit ``[units, 3, N]``, and the logit of each row whose id is one of the columns."""
    hidden, (count, vocab) = inputs.hidden, (len(inputs.hidden), len(inputs.weight))
    chosen = hidden.new_empty(count, dtype=torch.float32)
    # On sm_90 the height of a tile changes no bit: each softmax state belongs to one row.
    cut = schedule_of("few_rows", hidden)
    if count > cut.rows:
        cut = schedule_of("many_rows", hidden)
    row_tiles, units = -(-count // cut.rows), ceil_div(vocab, kernels.UNIT.value)
    width = kernels.UNIT.value if row_tiles * units >= 2 * processors(hidden.device) else kernels.BLOCK.value
    blocks = ceil_div(vocab, width)
    parts = hidden.new_empty((blocks, 3, count), dtype=torch.float32)
    flags = {"PER_ROW": inputs.temperature.ndim > 0, "ENTROPY": entropy}
    cap, is_capped = inputs.cap or NO_CAP, inputs.cap is not None
    stored = 0 if inputs.kept is None else inputs.kept.shape[1]
    with device_of(hidden):
        kernels.states[(row_tiles * blocks,)](
            (first := gemm.operand(hidden, cut.rows, cut.inner)).of(hidden),
            *first[1:3],
            (second := gemm.operand(inputs.weight, kernels.BLOCK.value, cut.inner)).of(inputs.weight),
            *second[1:3],
            *bias_of(inputs),
            *cap,
            temperature,
            parts,
            inputs.kept if stored else parts,
            inputs.first_kept,
            stored,
            count,
            vocab,
            hidden.shape[1],
            width,
            HIDDEN=first.kind,
            WEIGHT=second.kind,
            HAS_BIAS=inputs.bias is not None,
            CAPPED=is_capped,
            RAGGED=vocab % kernels.BLOCK.value > 0,
            KEEPS=stored > 0,
            BLOCK_M=cut.rows,
            BLOCK_K=cut.inner,
            GROUP=cut.group,
            **flags,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
        at = (hidden, *hidden.stride(), inputs.weight, *inputs.weight.stride(), *bias_of(inputs), *cap)
        kernels.selected[(ceil_div(count, kernels.SELECTED.value),)](
            *at,
            ids,
            chosen,
            inputs.start,
            count,
            vocab,
            hidden.shape[1],
            HAS_BIAS=inputs.bias is not None,
            CAPPED=is_capped,
            BLOCK_K=16 if hidden.dtype == torch.float32 and not INTERPRETED else 64,
            num_warps=4,
            num_stages=4,
        )
        if blocks > units:
            merged = hidden.new_empty((units, 3, count), dtype=torch.float32)
            grid = ceil_div(count, kernels.ROWS.value), units
            kernels.merge_blocks[grid](parts, merged, temperature, count, blocks, **flags, num_warps=1)
            parts = merged
    return parts, chosen


def _finish(
    parts: torch.Tensor,
    chosen: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor | float,
    ignore_index: int | None,
    vocab: int,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    entropy: bool,
) -> None:
    """Write the statistics of rows to ``results``, from the states of all units."""
    logp, lse, row_entropy, norm = results
    count = len(chosen)
    with device_of(parts):
        kernels.finish[(ceil_div(count, kernels.ROWS.value),)](
            *(parts, temperature, chosen, ids, logp, norm, lse, row_entropy),
            *(count, len(parts), vocab, ignore_index or 0),
            HAS_IGNORED=ignore_index is not None,
            PER_ROW=isinstance(temperature, torch.Tensor),
            ENTROPY=entropy,
            num_warps=1,
        )
