"""The backend ``cuda-sm90`` of linear_logp: tiles of logits in CUDA C++, forward and backward.

``linear_logp_sm90.cu`` defines the reduction order of the forward pass. Backward recomputes the logits with the same
bits, so the gradients belong to exactly the probabilities of the forward pass. ``op.py`` says what the functions take
and return.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.cuda.gemm.ahead import programs_of
from rl_kernels.core.cuda.launch import Kernel, kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.outputs import statistics_room
from rl_kernels.linear_logp import inputs, kept_columns
from rl_kernels.linear_logp.backends.cuda_sm90 import given, sampling
from rl_kernels.linear_logp.backends.cuda_sm90.backward import Steps
from rl_kernels.linear_logp.backends.cuda_sm90.tiles import (
    BACKWARD,
    BLOCK,
    BLOCKS,
    CODES,
    FORWARD,
    HEIGHT,
    INPUTS,
    Cut,
    Fields,
    Maps,
    copyable,
    program,
    read,
    variant,
)
from rl_kernels.linear_logp.backward import Backward
from rl_kernels.linear_logp.inputs import Inputs, first_kept, inputs_of, number_or_rows, part_of, slices
from rl_kernels.linear_logp.vocabulary import units

ARGS = "({}PPPPPPii)"
"""Layout of ``struct Args``; ``{}`` is the layout of ``struct Inputs``, its first part."""
WARP = 32
MOST_ROWS = 16384
"""Row limit of a launch; it bounds the memory of the softmax states."""


@prepared
def states(*args: Any) -> Launches:
    """Return the packed states and selected logits of a shard of the vocabulary, and its kept logits."""
    vocab_start, slots, entropy, saved_mib = args[8:]
    return _Forward(entropy, *args[:8], saved_mib, vocab_start, slots)


@prepared
def finish(*args: Any) -> Launches:
    """Return (logp, logsumexp, entropy, norm) from the states of all shards; two are empty without ``entropy``."""
    gathered, target_ids, _, ignore_index, vocab_size, entropy = args
    count, sizes = len(target_ids), (vocab_size, 0, 0, vocab_size, 0)
    # The merge depends on neither the dtype of the operands nor the cap.
    compiled = program(FORWARD, torch.bfloat16, Cut.of(count), entropy=entropy)
    merge = kernel(compiled, "finish", ARGS.format(INPUTS), gathered.device) if count else None

    def launch(gathered: torch.Tensor, target_ids: torch.Tensor, temperature: torch.Tensor, *_: Any) -> Any:
        parts, chosen = inputs.unpacked(gathered, target_ids, vocab_size, entropy=entropy)
        logp, norm, lse, row_entropy = statistics_room(chosen, entropy=entropy)
        if merge is not None:
            ids, scale = target_ids.to(torch.int64).contiguous(), number_or_rows(temperature)
            per_row = isinstance(scale, torch.Tensor)
            pointers = 0, scale.data_ptr() if per_row else 0, ids.data_ptr(), 0
            numbers = ignore_index or 0, count, *sizes, 1.0 if per_row else scale, ignore_index is not None
            outputs = [x.data_ptr() for x in (chosen, parts, logp, norm, lse, row_entropy)]
            merge.start(_finish_grid(count), 256, 0, False, (*pointers, *numbers, *outputs, BLOCKS, 0))
        return (logp, lse, row_entropy, norm) if entropy else (logp, logp.new_empty(0), logp.new_empty(0), norm)

    return launch


def programs(arch: str) -> list[Program]:
    """Return the programs compiled for a target: all of them for ``sm_90a``, none for others."""
    if arch != "sm_90a":
        return []
    return [*programs_of(arch), sampling.PROGRAM] + [
        program(file, dtype, cut, entropy=entropy, capped=capped, keeps=keeps, min_logit=min_logit)
        for file, keeps in ((FORWARD, False), (FORWARD, True), (BACKWARD, False))
        for dtype in CODES
        for cut in map(Cut.of, (HEIGHT, 2 * HEIGHT))
        for entropy in (False, True)
        for capped in (False, True)
        for min_logit in (False, True)
    ]


def _finish_grid(count: int) -> tuple[int, int, int]:
    return -(-count * WARP // 256), 1, 1


class _Block(NamedTuple):
    """The launches for a block of rows.

    Attributes:
        rows: the block.
        fields: members of the kernels' arguments.
        maps: tensor maps of ``states``.
        states: the kernel that writes states and selected logits.
        after: the kernel that writes the statistics, or merges blocks to units; None if there is nothing to merge.
        shape: parts of the vocabulary with a state, numbers of a state, rows.
        start: thread blocks of ``states``, threads of one, its bytes of dynamic shared memory, and that it waits.
        grid: thread blocks of ``after``.
        numbers: the last arguments.
    """

    rows: slice
    fields: Fields
    maps: Maps
    states: Kernel
    after: Kernel | None
    shape: tuple[int, int, int]
    start: tuple[tuple[int, int, int], int, int, bool]
    grid: tuple[int, int, int]
    numbers: tuple[int, int]


class _Forward:
    """The forward pass for inputs of one kind; with ``slots`` the states of a shard that begins at column ``start``."""

    def __init__(self, entropy: bool, *args: Any) -> None:
        hidden, weight, *_, saved_mib, start, slots = (*args, 0, None)[:11]
        vocab = weight.shape[0]
        self._entropy, self._start, self._slots, self._vocab = entropy, start, slots, vocab
        self._width = inputs.kept_width(hidden, vocab, saved_mib)
        call = inputs_of(args[:8], start=start, vocab=vocab)
        count = hidden.shape[0] if vocab else 0
        self._blocks = [self._block(call.block(rows), rows) for rows in slices(count, MOST_ROWS)]

    def _block(self, block: Inputs, rows: slice) -> _Block:
        """Prepare the launches for a block of rows."""
        hidden, fields, keeps = block.hidden, Fields(block), self._width > 0
        count, cut, device = hidden.shape[0], fields.cut, hidden.get_device()
        width = cut.blocks(count, self._vocab, device)
        parts = -(-self._vocab // (BLOCK * width))
        compiled = program(FORWARD, hidden.dtype, cut, entropy=self._entropy, keeps=keeps, **variant(block))
        form, after, grid = ARGS.format(fields.form), None, _finish_grid(count)
        if self._slots is None:
            after = kernel(compiled, "finish", form, hidden.device)
        elif width < BLOCKS:
            after, grid = (
                kernel(compiled, "merge_blocks", f"{form}P", hidden.device),
                (-(-count // 256), units(self._vocab), 1),
            )
        return _Block(
            rows,
            fields,
            Maps(),
            kernel(compiled, "states", f"TT{'T' * keeps}{form}", hidden.device),
            after,
            (parts, inputs.STATE, count),
            ((cut.grid(count, parts, device), 1, 1), cut.threads, cut.shared(stores=keeps), False),
            grid,
            (width, first_kept(self._vocab, self._width)),
        )

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Launch the kernels, block by block."""
        hidden, entropy, slots = args[0], self._entropy, self._slots
        logits = hidden.new_empty(hidden.shape[0], self._width, dtype=torch.float32)
        call = read(*args[:8], kept=logits, start=self._start, vocab=self._vocab)
        results: tuple[torch.Tensor, ...] = statistics_room(hidden, entropy=entropy) if slots is None else ()
        packed = () if slots is None else inputs.packed_room(hidden, slots, entropy=entropy)
        for one in self._blocks:
            block = call.block(one.rows)
            x = copyable(block.hidden)
            parts, chosen = x.new_empty(*one.shape, dtype=torch.float32), x.new_empty(one.shape[2], dtype=torch.float32)
            members, _order = one.fields.of(block)
            written = results if len(self._blocks) == 1 else [part_of(value, one.rows) for value in results]
            addresses = [value.data_ptr() for value in (chosen, parts, *written)] + [0] * (4 - len(written))
            arguments = *members, *addresses, *one.numbers
            maps = one.maps.of(x, block.weight, block.kept if self._width else None)
            one.states.start(*one.start, (*maps, *arguments))
            # Free a copy before the next one is made.
            del x
            if packed:
                merged = parts
                if one.after is not None:
                    merged = parts.new_empty((units(self._vocab), *one.shape[1:]))
                    one.after.start(one.grid, 256, 0, False, (*arguments, merged.data_ptr()))
                packed[1][: len(merged), :, one.rows] = merged[:, : packed[1].shape[1]]
                packed[2][one.rows] = chosen
            elif one.after is not None:
                one.after.start(one.grid, 256, 0, False, arguments)
        if packed:
            return packed[0], logits
        logp, norm, lse, row_entropy = results
        return (logp, lse, row_entropy, norm, logits) if entropy else (logp, norm, logits)


forward, forward_stats = prepared(partial(_Forward, False)), prepared(partial(_Forward, True))
forward_columns = partial(kept_columns.statistics, forward)
backward = backward_main_grad = prepared(partial(Backward, Steps()))
sample = given.sample
