"""linear_logp in Triton: tiles of logits stay in registers and are reduced there to softmax states or to dz.

Reduction order, which is the contract of this backend: a logit is a canonical chain over D. The vocabulary is cut into
units of 1024 columns, a unit into blocks of 256. Each block gives a softmax state; blocks are merged in ascending
order, then units. With many rows one program takes a whole unit, with few rows one block; both give the same bits. dH
is a canonical chain over the vocabulary or each of its segments (for FP32 inputs in spans of 256 columns), dW one over
the tokens; dbias adds tiles of tokens in ascending order.

``op.py`` says what the functions take and return.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of
from rl_kernels.core.outputs import statistics_room
from rl_kernels.core.triton_lib import gemm
from rl_kernels.core.triton_lib.launch import INTERPRETED, Launch, ceil_div
from rl_kernels.core.triton_lib.schedule import processors
from rl_kernels.linear_logp import inputs, kept_columns
from rl_kernels.linear_logp.backends.triton import given, kernels
from rl_kernels.linear_logp.backends.triton.backward import NO_CAP, Steps, leasts_of, schedule_of
from rl_kernels.linear_logp.backward import Backward
from rl_kernels.linear_logp.inputs import first_kept, number_or_rows


@prepared
def states(*args: Any) -> Launches:
    """Return the packed states and selected logits of a shard of the vocabulary, and its kept logits."""
    vocab_start, slots, entropy, saved_mib = args[8:]
    return _Forward(entropy, *args[:8], saved_mib, vocab_start, slots)


@prepared
def finish(*args: Any) -> Launches:
    """Return (logp, logsumexp, entropy, norm) from the states of all shards; two are empty without ``entropy``."""
    _, target_ids, temperature, ignore_index, vocab_size, entropy = args
    merge = _statistics(len(target_ids), vocab_size, temperature, ignore_index, entropy)

    def launch(gathered: torch.Tensor, target_ids: torch.Tensor, temperature: torch.Tensor, *_: Any) -> Any:
        parts, chosen = inputs.unpacked(gathered, target_ids, vocab_size, entropy=entropy)
        logp, norm, lse, row_entropy = statistics_room(chosen, entropy=entropy)
        if len(chosen):
            with device_of(parts):
                ids = target_ids.contiguous()
                merge(parts, number_or_rows(temperature), chosen, ids, logp, norm, lse, row_entropy)
        return (logp, lse, row_entropy, norm) if entropy else (logp, logp.new_empty(0), logp.new_empty(0), norm)

    return launch


def _statistics(count: int, vocab: int, temperature: torch.Tensor, ignore_index: int | None, entropy: bool) -> Launch:
    """Return the launch that merges the states of all units, and writes the statistics of rows."""
    units = ceil_div(vocab, kernels.UNIT.value)
    flags = ignore_index is not None, temperature.ndim > 0, entropy
    grid = (ceil_div(count, kernels.ROWS.value),)
    return Launch(kernels.finish, grid, (count, units, vocab, ignore_index or 0, *flags), num_warps=1)


class _Forward:
    """The forward pass for inputs of one kind; with ``slots`` the states of a shard that begins at column ``start``."""

    def __init__(self, entropy: bool, *args: Any) -> None:
        hidden, weight, _, bias, temperature, ignore_index, cap, least, saved_mib, start, slots = (*args, 0, None)[:11]
        (count, size), vocab = hidden.shape, len(weight)
        self._entropy, self._slots, self._is_empty = entropy, slots, not (count and vocab)
        self._width = stored = inputs.kept_width(hidden, vocab, saved_mib)
        if self._is_empty:
            return
        # On sm_90 the height of a tile changes no bit: each softmax state belongs to one row.
        cut = schedule_of("few_rows", hidden)
        if count > cut.rows:
            cut = schedule_of("many_rows", hidden)
        unit, block = kernels.UNIT.value, kernels.BLOCK.value
        row_tiles, units = ceil_div(count, cut.rows), ceil_div(vocab, unit)
        width = unit if row_tiles * units >= 2 * processors(hidden.device) else block
        self._blocks, self._units = ceil_div(vocab, width), units
        self._hidden, self._weight = gemm.operand(hidden, cut.rows, cut.inner), gemm.operand(weight, block, cut.inner)
        has_bias, per_row, bias_stride = bias is not None, temperature.ndim > 0, 0 if bias is None else bias.stride(0)
        has_least, self._least = least is not None, leasts_of(count, vocab, per_row=per_row, has_norm=False)
        self._states = Launch(
            kernels.states,
            (row_tiles * self._blocks,),
            (
                *(*self._hidden[1:3], *self._weight[1:3], bias_stride, first_kept(vocab, stored), stored),
                *(count, vocab, size, width, self._hidden.kind, self._weight.kind, has_bias, cap is not None, per_row),
                *(has_least, entropy, vocab % block > 0, stored > 0, cut.rows, cut.inner, cut.group),
            ),
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
        step = 16 if hidden.dtype == torch.float32 and not INTERPRETED else 64
        at = *hidden.stride(), *weight.stride(), bias_stride, start, count, vocab, size
        flags = has_bias, cap is not None, per_row, has_least, step
        grid = (ceil_div(count, kernels.SELECTED.value),)
        self._selected = Launch(kernels.selected, grid, (*at, *flags), num_warps=4, num_stages=4)
        grid_of_units = ceil_div(count, kernels.ROWS.value), units
        self._merge = Launch(kernels.merge_blocks, grid_of_units, (count, self._blocks, per_row, entropy), num_warps=1)
        self._statistics = _statistics(count, vocab, temperature, ignore_index, entropy)

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        bias: torch.Tensor | None,
        temperature: torch.Tensor,
        _: int | None,
        cap: torch.Tensor | None,
        min_logit: torch.Tensor | None,
        *rest: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Launch the kernels."""
        count, entropy, slots = len(hidden), self._entropy, self._slots
        logits = hidden.new_empty(count, self._width, dtype=torch.float32)
        results: tuple[torch.Tensor, ...] = statistics_room(hidden, entropy=entropy) if slots is None else ()
        parts = chosen = hidden
        if not self._is_empty:
            ids, scale = target_ids.contiguous(), number_or_rows(temperature)
            numbers, added = NO_CAP if cap is None else cap.tolist(), hidden if bias is None else bias
            chosen = hidden.new_empty(count, dtype=torch.float32)
            parts = hidden.new_empty(self._blocks, 3, count, dtype=torch.float32)
            operands = self._hidden.of(hidden), self._weight.of(weight)
            with device_of(hidden):
                least = ids if min_logit is None else self._least(min_logit.contiguous(), scale, ids, scale)
                self._states(*operands, added, *numbers, scale, least, parts, logits if self._width else parts)
                self._selected(hidden, weight, added, *numbers, ids, scale, least, chosen)
                if self._blocks > self._units:
                    merged = hidden.new_empty(self._units, 3, count, dtype=torch.float32)
                    self._merge(parts, merged, scale)
                    parts = merged
                if results:
                    self._statistics(parts, scale, chosen, ids, *results)
        if slots is not None:
            packed, states, selected = inputs.packed_room(hidden, slots, entropy=entropy)
            if not self._is_empty:
                states[: len(parts)] = parts[:, : states.shape[1]]
                selected.copy_(chosen)
            return packed, logits
        logp, norm, lse, row_entropy = results
        return (logp, lse, row_entropy, norm, logits) if entropy else (logp, norm, logits)


forward, forward_stats = prepared(partial(_Forward, False)), prepared(partial(_Forward, True))
forward_columns = partial(kept_columns.statistics, forward)
backward = backward_main_grad = prepared(partial(Backward, Steps()))
sample = given.sample
