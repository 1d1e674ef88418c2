"""Bugs of linear_logp's Triton kernels and host code, planted in copies of the backend; the checker must catch each.

They also run in Triton's interpreter, which is a thousand times slower, so a small case must show each one.
``LAUNCHES`` need large cases, or break a rule without changing a number; they are found in recorded launches.
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

MODULES = tuple(
    f"rl_kernels.linear_logp.{name}"
    for name in (
        *("vocabulary", "inputs", "packing", "tree", "sums", "backward"),
        *("backends.triton.kernels", "backends.triton.tiles"),
        *("blocks", "backends.triton.backward", "backends.triton.backend"),
    )
)
MODULES = ("rl_kernels.core.triton_lib.softcap", *MODULES)

KERNELS = (
    Bug(
        "columns beyond the vocabulary counted",
        'x = tl.where((columns < V)[None, :], x, float("-inf"))',
        'x = tl.where((columns < V + 1)[None, :], x, float("-inf"))',
    ),
    Bug(
        "id one past the vocabulary accepted, id 0 not",
        "return tl.where((id >= start) & (id < start + V), id",
        "return tl.where((id > start) & (id <= start + V), id",
    ),
    Bug("selected logit without its bias", "    if HAS_BIAS:\n        value +=", "    if False:\n        value +="),
    Bug(
        "selected logit of the row before",
        "lanes[:, None] == lanes[None, :], acc",
        "lanes[:, None] == lanes[None, :] + 1, acc",
    ),
    Bug(
        "last term of D skipped in the selected logit",
        "mask=(column >= 0)[:, None] & (at < D)",
        "mask=(column >= 0)[:, None] & (at < D - 1)",
    ),
    Bug(
        "block states after the first lost",
        "end = tl.minimum(begin + UNIT // BLOCK, blocks)",
        "end = tl.minimum(begin + 1, blocks)",
    ),
    Bug(
        "ignored rows have statistics",
        "active = here & (id != ignore_index) if HAS_IGNORED else here\n    inv",
        "active = here\n    inv",
    ),
    Bug(
        "ignored rows have a gradient",
        "active = here & (id != ignore_index) if HAS_IGNORED else here\n        inv",
        "active = here\n        inv",
    ),
    Bug(
        "target counted from the first piece",
        "column = _column(id, start, V) - begin",
        "column = _column(id, start, V) - begin + 1",
    ),
    Bug("bias gradient of the first row tile only", "for tile in range(tiles):", "for tile in range(1):"),
    Bug(
        "bias gradient of another column",
        "mask=columns < width)\n        if STORED",
        "mask=columns < width - 1)\n        if STORED",
    ),
    Bug(
        "last column of dz not written",
        "here[:, None] & (columns < width)[None, :])",
        "here[:, None] & (columns < width - 1)[None, :])",
    ),
)
CAPS = (
    Bug("selected logit not capped", "    if CAPPED:\n        value =", "    if False:\n        value ="),
    Bug("cap not differentiated", "        if CAPPED:\n            d = d", "        if False:\n            d = d"),
    Bug(
        "cap applied twice",
        "softcap.capped(x, cap, rate) if CAPPED",
        "softcap.capped(softcap.capped(x, cap, rate), cap, rate) if CAPPED",
    ),
    Bug(
        "cap differentiated at the wrong place",
        "softcap.slope(x, cap, rate)",
        "softcap.slope(x * inv[:, None], cap, rate)",
    ),
    Bug(
        "square of tanh near 0 not multiplied",
        "near = fma(product(u, square), ",
        "near = fma(product(square, square), ",
    ),
    Bug("tanh of negative logits positive", "tl.where(u < 0, -far, far)", "far"),
    Bug("polynomial of tanh where it no longer holds", "NEAR = tl.constexpr(0.5)", "NEAR = tl.constexpr(2.0)"),
    Bug("cap and rate exchanged", "is_capped = inputs.cap or NO_CAP", "is_capped = (inputs.cap or NO_CAP)[::-1]"),
)
HOST = (
    Bug("per-token temperature taken for one number", '{"PER_ROW": inputs.temperature.ndim > 0', '{"PER_ROW": False'),
    Bug(
        "upstream gradients exchanged",
        "for grad in (grad_logp, grad_logsumexp, grad_entropy))",
        "for grad in (grad_logsumexp, grad_logp, grad_entropy))",
    ),
    Bug(
        "rows of hidden reversed in the weight gradient",
        "gemm.matmul(dz.t(), hidden, out, continues",
        "gemm.matmul(dz.t(), hidden.flip(0), out, continues",
    ),
    Bug(
        "hidden gradient added to uninitialised memory",
        "gemm.matmul(dz, weight, out, continues=continues",
        "gemm.matmul(dz, weight, out, continues=True",
    ),
    Bug("blocks rounded down", "blocks = ceil_div(vocab, width)\n", "blocks = max(vocab // width, 1)\n"),
)
LAUNCHES = (
    Bug(
        "kept logits of another piece",
        "columns.start - first : columns.stop - first]",
        ": columns.stop - columns.start]",
    ),
    Bug("rows of kept logits as far apart as the piece is wide", "0 if kept is None else kept.stride(0)", "width"),
    Bug("kept from the first column on", "            inputs.first_kept,\n", "            0,\n"),
    Bug("rows of kept logits as far apart as the vocabulary is wide", "            stored,\n", "            vocab,\n"),
    Bug(
        "rows of kept logits summed", "block.kept_part(columns) if dbias is None else None", "block.kept_part(columns)"
    ),
    Bug("tiles of formed logits for kept ones", "rows=min(cut.rows, KEPT_ROWS), ", ""),
    Bug("kept logits of the first rows", "kept = None if self.kept is None else self.kept[rows]", "kept = self.kept"),
    Bug(
        "programs of a row tile too few",
        "kernels.states[(row_tiles * blocks,)]",
        "kernels.states[(max(row_tiles - 1, 1) * blocks,)]",
    ),
    Bug("one number per row for the norm", "new_empty((count, 2), dtype", "new_empty((count, 1), dtype"),
    Bug(
        "states without weighted sums",
        "parts = hidden.new_empty((blocks, 3, count)",
        "parts = hidden.new_empty((blocks, 2, count)",
    ),
    Bug(
        "states in the dtype of hidden",
        "parts = hidden.new_empty((blocks, 3, count), dtype=torch.float32)",
        "parts = hidden.new_empty((blocks, 3, count))",
    ),
    Bug("vocabulary ragged only if odd", "RAGGED=vocab % kernels.BLOCK.value > 0", "RAGGED=vocab % 2 > 0"),
    Bug("blocks merged as if they were units", "if blocks > units:\n", "if blocks > units + 20:\n"),
    Bug(
        "blocks merged for the first unit only",
        "grid = ceil_div(count, kernels.ROWS.value), units",
        "grid = ceil_div(count, kernels.ROWS.value), 1",
    ),
    Bug(
        "last rows are not finished",
        "kernels.finish[(ceil_div(count, kernels.ROWS.value),)]",
        "kernels.finish[(max(count // kernels.ROWS.value, 1),)]",
    ),
    Bug(
        "last selected logits are not formed",
        "kernels.selected[(ceil_div(count, kernels.SELECTED.value),)]",
        "kernels.selected[(max(count // kernels.SELECTED.value, 1),)]",
    ),
    Bug("bias read as if contiguous", "(inputs.bias, inputs.bias.stride(0))", "(inputs.bias, 1)"),
    Bug(
        "strided temperatures read as if contiguous",
        "temperature.contiguous() if temperature.ndim",
        "temperature if temperature.ndim",
    ),
    Bug(
        "strided ids read as if contiguous in the forward pass",
        "ids, temperature = inputs.target_ids.contiguous(),",
        "ids, temperature = inputs.target_ids,",
    ),
    Bug(
        "strided ids read as if contiguous in the backward pass",
        "                block.target_ids.contiguous(),\n",
        "                block.target_ids,\n",
    ),
    Bug("expanded upstream gradient read as if contiguous", "grad if grad is None else grad.contiguous()", "grad"),
    Bug(
        "tile box of hidden used for the weight",
        "gemm.operand(weight, kernels.BLOCK.value, cut.inner)",
        "gemm.operand(weight, cut.rows, cut.inner)",
    ),
    Bug(
        "dz rows not padded to whole blocks",
        "ceil_div(width, BLOCK) * BLOCK))[:, :width]",
        "width))",
    ),
    Bug(
        "one sum over rows for all tiles",
        "hidden.new_empty((row_tiles, width), dtype",
        "hidden.new_empty((1, width), dtype",
    ),
    Bug(
        "last columns of the bias gradient missing",
        "kernels.add_tiles[(ceil_div(width, kernels.BLOCK.value),)]",
        "kernels.add_tiles[(max(width // kernels.BLOCK.value, 1),)]",
    ),
    Bug(
        "tiles of the gradient rounded down",
        "tiles = row_tiles * ceil_div(width, kernels.BLOCK.value)\n",
        "tiles = row_tiles * max(width // kernels.BLOCK.value, 1)\n",
    ),
    Bug(
        "schedule depends on the rows on every architecture",
        'if arch != "sm90":',
        'if arch != "sm90" and name != "few_rows":',
    ),
    Bug("16-bit schedule used for FP32", "if hidden.dtype not in HALF:\n", "if False:\n"),
    Bug(
        "blocks of rows that cut the terms of the bias gradient",
        "max(height, LEAST_HEIGHT) // TOKENS * TOKENS",
        "max(height, LEAST_HEIGHT) + 3",
    ),
    Bug(
        "upstream of the first row block used for all",
        "self.inputs.block(rows), self.upstream.rows(rows)",
        "self.inputs.block(rows), self.upstream.rows(slice(len(self.inputs.hidden[rows])))",
    ),
)
SHARDS = (
    Bug(
        "selected logit counted from column 0",
        "            chosen,\n            inputs.start,\n",
        "            chosen,\n            0,\n",
    ),
    Bug("gradient counted from column 0", "                block.start,\n", "                0,\n"),
    Bug("ids of other shards are bad", "                block.vocab,\n", "                len(weight),\n"),
    Bug(
        "ids beyond the last column accepted",
        "*(count, len(parts), vocab, ignore",
        "*(count, len(parts), 1 << 30, ignore",
    ),
    Bug("states of the first unit alone", "*(count, len(parts), vocab, ignore", "*(count, 1, vocab, ignore"),
    Bug("empty shard launched", "if not len(hidden) or not len(weight):", "if not len(hidden):"),
    Bug(
        "strided ids of a shard read as if contiguous",
        "_states(inputs, target_ids.contiguous(), number",
        "_states(inputs, target_ids, number",
    ),
    Bug(
        "strided ids read as if contiguous at the end",
        "ids, number = target_ids.contiguous(),",
        "ids, number = target_ids,",
    ),
)
"""Bugs of the two parts of the forward pass over shards, and of backward on a shard, found in recorded launches."""
CASES = ("bias", "temperature-per-token", "odd", "pad-token", "blocks")

MUTANTS = (
    Mutants("triton", MODULES, (*KERNELS, *HOST), CASES),
    Mutants("triton", MODULES, CAPS, ("softcap-small",)),
)
