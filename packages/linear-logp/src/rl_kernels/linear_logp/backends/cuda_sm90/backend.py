"""The backend ``cuda-sm90`` of linear_logp: tiles of logits in CUDA C++, forward and backward.

``linear_logp_sm90.cu`` defines the reduction order of the forward pass. Backward recomputes the logits with the same
bits, so the gradients belong to exactly the probabilities of the forward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.cuda.gemm.ahead import programs_of
from rl_kernels.core.cuda.launch import Kernel, kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.tensor_map import tensor_map
from rl_kernels.linear_logp import memory
from rl_kernels.linear_logp.backends.cuda_sm90.backward import Steps
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
    Fields,
    copyable,
    maps_of,
    program,
    read,
)
from rl_kernels.linear_logp.backward import Backward
from rl_kernels.linear_logp.inputs import Inputs, cap_of, first_kept, number_or_rows, part_of, slices
from rl_kernels.linear_logp.vocabulary import units

ARGS = "({}PPPPPPii)"
"""Layout of ``struct Args``; ``{}`` is the layout of ``struct Inputs``, its first part."""
WARP = 32
MOST_ROWS = 16384
"""Row limit of a launch; it bounds the memory of the softmax states."""


@prepared
def forward(*args: Any) -> Launches:
    """Return (logp, norm, kept), ``[N]``, ``[N, 2]`` and ``[N, width]``."""
    return _Forward(False, *args)


@prepared
def forward_stats(*args: Any) -> Launches:
    """Return (logp, logsumexp, entropy, norm, kept), the first three ``[N]``, then ``[N, 2]`` and ``[N, width]``."""
    return _Forward(True, *args)


@prepared
def states(*args: Any) -> Launches:
    """Return the packed states and selected logits of a shard of the vocabulary (``memory``), and its kept logits."""
    vocab_start, slots, entropy, saved_mib = args[7:]
    return _Forward(*(entropy, *args[:7], saved_mib, vocab_start, slots))


@prepared
def backward(*args: Any) -> Launches:
    """Return (dhidden, dweight, dbias), each empty if not needed."""
    return Backward(Steps(), *args)


@prepared
def backward_main_grad(*args: Any) -> Launches:
    """Continue the totals, the last two arguments; return (dhidden, dbias), each empty if not needed."""
    return Backward(Steps(), *args)


@prepared
def finish(
    gathered: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    vocab_size: int,
    entropy: bool,
) -> Launches:
    """Return (logp, logsumexp, entropy, norm) from the packed states of all shards; two are empty if not wanted."""
    count, sizes = len(target_ids), (vocab_size, 0, 0, vocab_size, 0)
    # The merge depends on neither the dtype of the operands nor the cap.
    made = program(FORWARD, torch.bfloat16, Cut.of(count), entropy=entropy)
    finished = kernel(made, "finish", ARGS.format(INPUTS), gathered.device) if count else None

    def launch(gathered: torch.Tensor, target_ids: torch.Tensor, temperature: torch.Tensor, *_: Any) -> Any:
        parts, chosen = memory.unpacked(gathered, target_ids, vocab_size, entropy=entropy)
        logp, norm, lse, row_entropy = memory.statistics(chosen, entropy)
        if finished is not None:
            ids, scale = target_ids.to(torch.int64).contiguous(), number_or_rows(temperature)
            per_row = isinstance(scale, torch.Tensor)
            pointers = 0, scale.data_ptr() if per_row else 0, ids.data_ptr(), 0
            numbers = ignore_index or 0, count, *sizes, 1.0 if per_row else scale, ignore_index is not None
            outputs = [x.data_ptr() for x in (chosen, parts, logp, norm, lse, row_entropy)]
            finished.start(_finish_grid(count), 256, 0, False, (*pointers, *numbers, *outputs, BLOCKS, 0))
        return (logp, lse, row_entropy, norm) if entropy else (logp, logp.new_empty(0), logp.new_empty(0), norm)

    return launch


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


def _finish_grid(count: int) -> tuple[int, int, int]:
    return -(-count * WARP // 256), 1, 1


class _Block(NamedTuple):
    """The launches for a block of rows.

    Attributes:
        rows: the block.
        fields: members of the kernels' arguments.
        states: the kernel that writes states and selected logits.
        after: the kernel that writes the statistics, or merges blocks to units; None if there is nothing to merge.
        shape: parts of the vocabulary with a state, numbers of a state, rows.
        grid: thread blocks of ``states``, of ``shared`` bytes each.
        shared: bytes of dynamic shared memory.
        numbers: the last arguments.
    """

    rows: slice
    fields: Fields
    states: Kernel
    after: Kernel | None
    shape: tuple[int, int, int]
    grid: tuple[int, int, int]
    shared: int
    numbers: tuple[int, int]


class _Forward:
    """The forward pass for inputs of one kind; with ``slots`` the states of a shard that begins at column ``start``."""

    def __init__(
        self,
        entropy: bool,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        bias: torch.Tensor | None,
        temperature: torch.Tensor,
        ignore_index: int | None,
        cap: torch.Tensor | None,
        saved_mib: int | None,
        start: int = 0,
        slots: int | None = None,
    ) -> None:
        vocab = weight.shape[0]
        self._entropy, self._start, self._slots, self._vocab = entropy, start, slots, vocab
        self._width = memory.kept_width(hidden, vocab, saved_mib)
        operands = hidden, weight, target_ids, bias, temperature, ignore_index, cap_of(cap)
        call = Inputs(*operands, start=start, vocab=vocab)
        count = hidden.shape[0] if vocab else 0
        self._blocks = [self._block(call.block(rows), rows) for rows in slices(count, MOST_ROWS)]

    def _block(self, block: Inputs, rows: slice) -> _Block:
        """Prepare the launches for a block of rows."""
        hidden, fields, keeps = block.hidden, Fields(block), self._width > 0
        count, cut, device = hidden.shape[0], fields.cut, hidden.get_device()
        width = cut.blocks(count, self._vocab, device)
        parts = -(-self._vocab // (BLOCK * width))
        made = program(FORWARD, hidden.dtype, cut, entropy=self._entropy, capped=block.cap is not None, keeps=keeps)
        form, after = ARGS.format(fields.form), None
        if self._slots is None:
            after = kernel(made, "finish", form, hidden.device)
        elif width < BLOCKS:
            after = kernel(made, "merge_blocks", f"{form}P", hidden.device)
        return _Block(
            rows,
            fields,
            kernel(made, "states", f"TT{'T' * keeps}{form}", hidden.device),
            after,
            (parts, memory.STATE, count),
            (cut.grid(count, parts, device), 1, 1),
            cut.shared(stores=keeps),
            (width, first_kept(self._vocab, self._width)),
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        bias: torch.Tensor | None,
        temperature: torch.Tensor,
        ignore_index: int | None,
        cap: torch.Tensor | None,
        *_: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Launch the kernels, block by block."""
        entropy, slots = self._entropy, self._slots
        logits = hidden.new_empty((hidden.shape[0], self._width), dtype=torch.float32)
        operands = hidden, weight, target_ids, bias, temperature, ignore_index, cap_of(cap)
        call = read(Inputs(*operands, kept=logits, start=self._start, vocab=self._vocab))
        results: tuple[torch.Tensor, ...] = memory.statistics(hidden, entropy) if slots is None else ()
        packed = () if slots is None else memory.packed_room(hidden, slots, entropy=entropy)
        for one in self._blocks:
            block = call.block(one.rows)
            x = copyable(block.hidden)
            parts, chosen = x.new_empty(one.shape, dtype=torch.float32), x.new_empty(one.shape[2], dtype=torch.float32)
            members, _order = one.fields.of(block)
            tensors = chosen, parts, *[part_of(value, one.rows) for value in results]
            arguments = *members, *[value.data_ptr() for value in tensors], *[0] * (6 - len(tensors)), *one.numbers
            maps: tuple[Any, ...] = maps_of(x, block.weight)
            if block.kept is not None and self._width:
                maps = *maps, tensor_map(block.kept, (HEIGHT, SWIZZLE // logits.itemsize), swizzle=SWIZZLE)
            one.states.start(one.grid, one.fields.cut.threads, one.shared, False, (*maps, *arguments))
            # Free a copy before the next one is made.
            del x
            if packed:
                parts = self._merged(one, parts, arguments)
                packed[1][: len(parts), :, one.rows] = parts[:, : packed[1].shape[1]]
                packed[2][one.rows] = chosen
            elif one.after is not None:
                one.after.start(_finish_grid(one.shape[2]), 256, 0, False, arguments)
        if packed:
            return packed[0], logits
        logp, norm, lse, row_entropy = results
        return (logp, lse, row_entropy, norm, logits) if entropy else (logp, norm, logits)

    def _merged(self, one: _Block, parts: torch.Tensor, arguments: tuple[Any, ...]) -> torch.Tensor:
        """Return the states of units."""
        if one.after is None:
            return parts
        merged = parts.new_empty((units(self._vocab), *one.shape[1:]))
        grid = -(-one.shape[2] // 256), merged.shape[0], 1
        one.after.start(grid, 256, 0, False, (*arguments, merged.data_ptr()))
        return merged
