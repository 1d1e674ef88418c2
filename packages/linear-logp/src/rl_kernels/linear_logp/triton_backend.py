"""linear_logp in Triton: tiles of logits that live in registers, and end there as softmax states or as a gradient.

Order of the sums, which is the contract of this backend: a logit is a canonical chain over D. The vocabulary is cut
into segments of 4096 columns, a segment into blocks of 256; every block gives a state of its own, blocks are merged in
ascending order, and so are segments. Whether one program takes a whole segment or one block follows the number of rows
and changes no bit. dH and dW are canonical chains over the vocabulary and over the tokens; dbias adds blocks of tokens,
in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from rl_kernels.core.operator import arch_of
from rl_kernels.core.rowwise import LogpUpstream
from rl_kernels.core.triton_lib import gemm, softmax
from rl_kernels.core.triton_lib.launch import INTERPRETED, device_of
from rl_kernels.core.triton_lib.schedule import HALF, Schedule, processors, tuned
from rl_kernels.linear_logp.backward import gradients
from rl_kernels.linear_logp.inputs import Inputs

SEGMENT = tl.constexpr(4096)
"""Columns whose states are merged before any others."""
BLOCK = tl.constexpr(256)
"""Columns of a tile, which is where a sum over columns begins."""
ROWS = tl.constexpr(32)
"""Rows whose states one program merges."""
TOKENS = tl.constexpr(128)
"""Rows of hidden whose gradient to the bias is one term of its sum; blocks of rows are multiples of it."""
SELECTED = tl.constexpr(64)
"""Rows whose selected logits one program forms."""
SELECTED_INNER = {torch.float32: 16, torch.bfloat16: 64, torch.float16: 64}
"""Terms of D that it loads at a time."""
LEAST_PIECE, LEAST_HEIGHT = 2048, 4096
"""Columns and rows that the backward pass takes at once if there is no room for more: less would be slow."""


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


def backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    logsumexp: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_logp: torch.Tensor | None,
    grad_logsumexp: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    workspace_mib: int,
    needed: Sequence[bool],
    main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dhidden, dweight, dbias), empty where not needed; with ``main_grad`` dweight is added to that."""
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index)
    grads = (grad if grad is None else grad.contiguous() for grad in (grad_logp, grad_logsumexp, grad_entropy))
    upstream = LogpUpstream(target_ids, logsumexp, entropy, *grads)
    return gradients(Steps(), inputs, upstream, workspace_mib, needed, main_grad)


def backward_main_grad(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Add dweight to ``main_grad``, the last argument, and return (dhidden, dbias), empty where not needed."""
    dhidden, _, dbias = backward(*args)  # type: ignore[arg-type]
    return dhidden, dbias


def schedule_of(name: str, hidden: torch.Tensor) -> Schedule:
    """Return how tiles of logits are formed: where bits might follow it, by dtype and architecture alone."""
    if INTERPRETED:
        return Schedule(64, BLOCK.value, 64, 4, 1)
    if hidden.dtype not in HALF:
        return Schedule(32, BLOCK.value, 16, 8, 3)
    if arch_of(hidden.device.type, hidden.device.index) != "sm90":
        return Schedule(64, BLOCK.value, 32, 8, 3)
    return Schedule(**tuned("rl_kernels.linear_logp")[name])


def _statistics(inputs: Inputs, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, (count, vocab) = inputs.hidden, (len(inputs.hidden), len(inputs.weight))
    logp, lse, chosen = (hidden.new_empty(count, dtype=torch.float32) for _ in range(3))
    row_entropy = hidden.new_empty(count, dtype=torch.float32) if entropy else lse
    if not count:
        return logp, lse, row_entropy
    # On sm_90 a tile's height changes no bit: a state is formed within a row.
    cut = schedule_of("few_rows", hidden)
    if count > cut.rows:
        cut = schedule_of("many_rows", hidden)
    row_tiles, segments = -(-count // cut.rows), triton.cdiv(vocab, SEGMENT.value)
    width = SEGMENT.value if row_tiles * segments >= 2 * processors(hidden.device) else BLOCK.value
    units = triton.cdiv(vocab, width)
    parts = hidden.new_empty((units, 3, count), dtype=torch.float32)
    ids, temperature = inputs.target_ids.contiguous(), _number_or_rows(inputs.temperature)
    flags = {"PER_ROW": inputs.temperature.ndim > 0, "ENTROPY": entropy}
    with device_of(hidden):
        _states[(row_tiles * units,)](
            *(first := gemm.operand(hidden, cut.rows, cut.inner))[:3],
            *(second := gemm.operand(inputs.weight, BLOCK.value, cut.inner))[:3],
            *_bias(inputs),
            temperature,
            parts,
            count,
            vocab,
            hidden.shape[1],
            width,
            HIDDEN=first.kind,
            WEIGHT=second.kind,
            HAS_BIAS=inputs.bias is not None,
            RAGGED=vocab % BLOCK.value > 0,
            BLOCK_M=cut.rows,
            BLOCK_K=cut.inner,
            GROUP=cut.group,
            **flags,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
        at = (hidden, *hidden.stride(), inputs.weight, *inputs.weight.stride(), *_bias(inputs))
        _selected[(triton.cdiv(count, SELECTED.value),)](
            *at,
            ids,
            chosen,
            count,
            vocab,
            hidden.shape[1],
            HAS_BIAS=inputs.bias is not None,
            BLOCK_K=SELECTED_INNER[hidden.dtype],
            num_warps=4,
            num_stages=4,
        )
        programs = triton.cdiv(count, ROWS.value)
        if units > segments:
            merged = hidden.new_empty((segments, 3, count), dtype=torch.float32)
            _merge_blocks[(programs, segments)](parts, merged, temperature, count, units, **flags, num_warps=1)
            parts = merged
        results = (chosen, ids, logp, lse, row_entropy, count, segments, vocab, inputs.ignore_index or 0)
        _finish[(programs,)](
            parts, temperature, *results, HAS_IGNORED=inputs.ignore_index is not None, **flags, num_warps=1
        )
    return logp, lse, row_entropy


def _number_or_rows(temperature: torch.Tensor) -> torch.Tensor | float:
    return temperature.contiguous() if temperature.ndim else float(temperature)


def _bias(inputs: Inputs) -> tuple[torch.Tensor, int]:
    """Return the bias and its stride, or a tensor that is not read."""
    return (inputs.hidden, 0) if inputs.bias is None else (inputs.bias, inputs.bias.stride(0))


class Steps:
    """One piece of the vocabulary for one block of rows of the backward pass."""

    def cut(self, inputs: Inputs, workspace: int, needed: Sequence[bool]) -> tuple[int, int]:
        """Return (piece, height), multiples of 256 and 128: all rows at once if a piece of 2048 columns fits then."""
        (count, size), vocab = inputs.hidden.shape, len(inputs.weight)
        item, tiles = inputs.hidden.itemsize, triton.cdiv(count, TOKENS.value)
        width = workspace // (count * item + 4 * tiles * needed[2]) // BLOCK.value * BLOCK.value
        if width >= min(vocab, LEAST_PIECE):
            pieces = triton.cdiv(vocab, width)
            return triton.cdiv(triton.cdiv(vocab, pieces), BLOCK.value) * BLOCK.value, tiles * TOKENS.value
        height = (workspace - 4 * LEAST_PIECE * size) // (LEAST_PIECE * item)
        return LEAST_PIECE, max(height, LEAST_HEIGHT) // TOKENS.value * TOKENS.value

    def dlogits(
        self, block: Inputs, upstream: LogpUpstream, columns: slice, dbias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return dz, rounded, and add its sum over rows to dbias."""
        hidden, weight = block.hidden, block.weight
        count, width = len(hidden), columns.stop - columns.start
        cut = schedule_of("gradient", hidden)
        # Rows start where a descriptor may, whatever the width.
        dz = hidden.new_empty((count, triton.cdiv(width, BLOCK.value) * BLOCK.value))[:, :width]
        stored = gemm.described(dz)
        row_tiles = triton.cdiv(count, cut.rows)
        tiles = row_tiles * triton.cdiv(width, BLOCK.value)
        partial = hidden.new_empty((row_tiles, width), dtype=torch.float32) if dbias is not None else hidden
        lse, *others = upstream[1:]
        saved = [lse if value is None else value for value in others]
        with device_of(hidden):
            _dlogits[(min(tiles, processors(hidden.device)) if cut.persistent else tiles,)](
                *(first := gemm.operand(hidden, cut.rows, cut.inner))[:3],
                *(second := gemm.operand(weight, BLOCK.value, cut.inner))[:3],
                *_bias(block),
                block.target_ids.contiguous(),
                _number_or_rows(block.temperature),
                lse,
                *saved,
                gemm.descriptor(dz, cut.rows, BLOCK.value) if stored else dz,
                dz.stride(0),
                partial,
                count,
                len(weight),
                hidden.shape[1],
                columns.start,
                width,
                block.ignore_index or 0,
                HIDDEN=first.kind,
                WEIGHT=second.kind,
                STORED=stored,
                HAS_BIAS=block.bias is not None,
                PER_ROW=block.temperature.ndim > 0,
                HAS_IGNORED=block.ignore_index is not None,
                HAS_LOGP=upstream.grad_logp is not None,
                HAS_LSE=upstream.grad_logsumexp is not None,
                HAS_ENTROPY=upstream.grad_entropy is not None,
                DBIAS=dbias is not None,
                BLOCK_M=cut.rows,
                BLOCK_K=cut.inner,
                GROUP=cut.group,
                PERSISTENT=cut.persistent,
                num_warps=cut.warps,
                num_stages=cut.stages,
            )
            if dbias is not None:
                _add_tiles[(triton.cdiv(width, BLOCK.value),)](partial, dbias, row_tiles, width, num_warps=4)
        return dz

    def add_dhidden(self, dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz @ weight`` to out, or let its chain go on."""
        gemm.matmul(dz, weight, out, continues=continues)

    def add_dweight(self, dz: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz^T @ hidden`` to out, or let its chain go on."""
        gemm.matmul(dz.t(), hidden, out, continues=continues)


@triton.jit
def _raw_logits(
    hidden,
    hidden_row,
    hidden_k,
    weight,
    weight_row,
    weight_k,
    bias,
    bias_stride,
    row,
    first,
    N,
    V,
    D,
    HIDDEN: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return a tile of logits before the temperature."""
    x = gemm.chain(
        *(hidden, hidden_row, hidden_k, weight, weight_row, weight_k, row, first, N, V, D),
        tl.zeros((BLOCK_M, BLOCK), tl.float32),
        *(HIDDEN, WEIGHT, BLOCK_M, BLOCK, BLOCK_K),
    )
    if HAS_BIAS:
        columns = first + tl.arange(0, BLOCK)
        x += tl.load(bias + columns.to(tl.int64) * bias_stride, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _column(id, V):
    """Return the columns that ids select, in 32 bits; -1 for one that is none."""
    return tl.where((id >= 0) & (id < V), id, -1).to(tl.int32)


@triton.jit(do_not_specialize=["N", "V", "width"])
def _states(
    hidden,
    hidden_row,
    hidden_k,
    weight,
    weight_row,
    weight_k,
    bias,
    bias_stride,
    temperature,
    parts,
    N,
    V,
    D,
    width,
    HIDDEN: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program some rows and ``width`` columns, a segment or a block: the states of its rows go to ``parts``."""
    row_tile, unit = gemm.place_of(tl.program_id(0), tl.cdiv(N, BLOCK_M), tl.cdiv(V, width), GROUP)
    row = row_tile * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    here = rows < N
    c = softmax.inverse(temperature, rows, here, PER_ROW) * softmax.LOG2E
    operands = (hidden, hidden_row, hidden_k, weight, weight_row, weight_k, bias, bias_stride)
    total, weighted = tl.zeros_like(c), tl.zeros_like(c)
    top = total + float("-inf")
    # Flattened, the loads of the next block are under way while this one's states are formed.
    for first in tl.range(unit * width, tl.minimum(unit * width + width, V), BLOCK, flatten=True):
        x = _raw_logits(*operands, row, first, N, V, D, HIDDEN, WEIGHT, HAS_BIAS, BLOCK_M, BLOCK_K)
        columns = first + tl.arange(0, BLOCK)
        if RAGGED:
            x = tl.where((columns < V)[None, :], x, float("-inf"))
        block_top, block_total, block_weighted = softmax.rows_state(x, c, ENTROPY)
        top, total, weighted = softmax.merge(top, total, weighted, block_top, block_total, block_weighted, c, ENTROPY)
    softmax.store_part(parts, unit, N, rows, here, top, total, weighted, ENTROPY)


@triton.jit(do_not_specialize=["N", "V"])
def _selected(
    hidden,
    hidden_row,
    hidden_k,
    weight,
    weight_row,
    weight_k,
    bias,
    bias_stride,
    ids,
    chosen,
    N,
    V,
    D,
    HAS_BIAS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program some rows: the diagonal of their product with the rows of the weight that they select.

    A chain has the same bits in every tile, so this costs less than to look for the selected logit in each of them.
    """
    rows = tl.program_id(0) * SELECTED + tl.arange(0, SELECTED)
    column = _column(tl.load(ids + rows, mask=rows < N, other=-1), V)
    inner = tl.arange(0, BLOCK_K)
    left = hidden + rows.to(tl.int64)[:, None] * hidden_row
    right = weight + column.to(tl.int64)[:, None] * weight_row
    acc = tl.zeros((SELECTED, SELECTED), tl.float32)
    for k in range(0, D, BLOCK_K):
        at = (k + inner).to(tl.int64)[None, :]
        x = tl.load(left + at * hidden_k, mask=(rows < N)[:, None] & (at < D), other=0.0)
        y = tl.load(right + at * weight_k, mask=(column >= 0)[:, None] & (at < D), other=0.0)
        acc = gemm.step(x, y, acc)
    lanes = tl.arange(0, SELECTED)
    value = tl.sum(tl.where(lanes[:, None] == lanes[None, :], acc, 0.0), 1)
    if HAS_BIAS:
        value += tl.load(bias + column.to(tl.int64) * bias_stride, mask=column >= 0, other=0.0).to(tl.float32)
    tl.store(chosen + rows, value, mask=rows < N)


@triton.jit(do_not_specialize=["count", "units"])
def _merge_blocks(parts, merged, temperature, count, units, PER_ROW: tl.constexpr, ENTROPY: tl.constexpr):
    """One program some rows of a segment: the states of its blocks, merged."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < count
    c = softmax.inverse(temperature, rows, here, PER_ROW) * softmax.LOG2E
    begin = tl.program_id(1) * (SEGMENT // BLOCK)
    end = tl.minimum(begin + SEGMENT // BLOCK, units)
    top, total, weighted = softmax.merge_parts(parts, begin, end, count, rows, here, c, ENTROPY)
    softmax.store_part(merged, tl.program_id(1), count, rows, here, top, total, weighted, ENTROPY)


@triton.jit(do_not_specialize=["count", "segments", "V", "ignore_index"])
def _finish(
    parts,
    temperature,
    chosen,
    ids,
    logp,
    lse,
    entropy,
    count,
    segments,
    V,
    ignore_index,
    HAS_IGNORED: tl.constexpr,
    PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """One program some rows: their segments, merged, and the statistics."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < count
    id = tl.load(ids + rows, mask=here, other=0)
    active = here & (id != ignore_index) if HAS_IGNORED else here
    inv = softmax.inverse(temperature, rows, here, PER_ROW)
    c = inv * softmax.LOG2E
    top, total, weighted = softmax.merge_parts(parts, 0, segments, count, rows, here, c, ENTROPY)
    x = tl.load(chosen + rows, mask=active & (id >= 0) & (id < V), other=float("nan"))
    softmax.store_statistics(x, top, total, weighted, inv, logp, lse, entropy, rows, here, active, ENTROPY)


@triton.jit(do_not_specialize=["N", "V", "begin", "width", "ignore_index"])
def _dlogits(
    hidden,
    hidden_row,
    hidden_k,
    weight,
    weight_row,
    weight_k,
    bias,
    bias_stride,
    ids,
    temperature,
    logsumexp,
    entropies,
    grad_logp,
    grad_logsumexp,
    grad_entropy,
    dz,
    dz_row,
    partial,
    N,
    V,
    D,
    begin,
    width,
    ignore_index,
    HIDDEN: tl.constexpr,
    WEIGHT: tl.constexpr,
    STORED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_ROW: tl.constexpr,
    HAS_IGNORED: tl.constexpr,
    HAS_LOGP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    DBIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """One program a tile of the gradient of columns ``begin`` to ``begin + width``, or tile after tile."""
    tiles_m, tiles_n = tl.cdiv(N, BLOCK_M), tl.cdiv(width, BLOCK)
    last = tiles_m * tiles_n if PERSISTENT else tl.program_id(0) + 1
    operands = (hidden, hidden_row, hidden_k, weight, weight_row, weight_k, bias, bias_stride)
    for index in tl.range(tl.program_id(0), last, tl.num_programs(0), flatten=PERSISTENT):
        tile_m, tile_n = gemm.place_of(index, tiles_m, tiles_n, GROUP)
        row, first = tile_m * BLOCK_M, tile_n * BLOCK
        x = _raw_logits(*operands, row, begin + first, N, V, D, HIDDEN, WEIGHT, HAS_BIAS, BLOCK_M, BLOCK_K)
        rows, columns = row + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK)
        here = rows < N
        id = tl.load(ids + rows, mask=here, other=-1)
        column = _column(id, V) - begin
        active = here & (id != ignore_index) if HAS_IGNORED else here
        inv = softmax.inverse(temperature, rows, here, PER_ROW)
        lse = tl.load(logsumexp + rows, mask=here, other=0.0)
        entropy = tl.load(entropies + rows, mask=here, other=0.0)
        chosen, slope, curve = softmax.upstream_of(
            grad_logp, grad_logsumexp, grad_entropy, rows, active, inv, HAS_LOGP, HAS_LSE, HAS_ENTROPY
        )
        rest = softmax.nothing_or_nan(id, V)
        selected = columns[None, :] == column[:, None]
        d = softmax.dlogits(
            *(x, selected, rest[:, None], inv[:, None], lse[:, None], entropy[:, None]),
            *(chosen[:, None], slope[:, None], curve[:, None], HAS_ENTROPY),
        )
        if HAS_IGNORED or DBIAS:
            d = tl.where(active[:, None], d, 0.0)
        if DBIAS:
            place = partial + tl.full((), tile_m, tl.int64) * width + columns
            tl.store(place, tl.sum(d, 0), mask=columns < width)
        if STORED:
            dz.store([row, first], d.to(dz.dtype))
        else:
            place = dz + rows.to(tl.int64)[:, None] * dz_row + columns[None, :]
            tl.store(place, d.to(dz.dtype.element_ty), mask=here[:, None] & (columns < width)[None, :])


@triton.jit(do_not_specialize=["tiles", "width"])
def _add_tiles(partial, out, tiles, width):
    """One program some columns: the partial sums of all tiles of rows, in ascending order, added to ``out``."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    total = tl.load(out + columns, mask=here, other=0.0)
    for tile in range(tiles):
        total += tl.load(partial + tl.full((), tile, tl.int64) * width + columns, mask=here, other=0.0)
    tl.store(out + columns, total, mask=here)
