"""Bugs of the host code of linear_logp's backend ``cuda-sm90``, planted in copies of that code.

``SHOWN`` give wrong numbers, which the quick cases find on a GPU. ``LAUNCHES`` access memory that they must not, need
larger cases, or break a rule without changing a number; they are found in recorded launches, which run no kernel.
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

HOST = "backends.cuda_sm90"
MODULES = tuple(
    f"rl_kernels.linear_logp.{name}"
    for name in ("inputs", "sums", "backward", f"{HOST}.tiles", "blocks", f"{HOST}.backward", f"{HOST}.backend")
)
NORM = "logp, norm = like.new_empty(count, dtype=torch.float32), like.new_empty("

SHOWN = (
    Bug("temperature missing", "1.0 if per_row else float(inputs.temperature)", "1.0"),
    Bug(
        "temperature of the first row for all",
        "temperatures = inputs.temperature.contiguous() if per_row else None",
        "temperatures = None",
    ),
    Bug("bias left out", "bias = None if inputs.bias is None else inputs.bias.contiguous()", "bias = None"),
    Bug("nothing is ignored", "temperature, ignores)\n", "temperature, False)\n"),
    Bug(
        "entropy not computed",
        "made = program(FORWARD, hidden.dtype, cut, entropy=entropy,",
        "made = program(FORWARD, hidden.dtype, cut, entropy=False,",
    ),
    Bug("logits not capped", "capped=inputs.cap is not None", "capped=False"),
    Bug("logits not capped in the backward pass", "block.cap is not None", "False"),
    Bug("cap and rate exchanged", "(*inputs.cap, 1 /", "(*reversed(inputs.cap), 1 /"),
    Bug("derivative of the cap without its scale", "inputs.cap.softcap * inputs.cap.rate", "1.0"),
    Bug("derivative of another cap", "1 / inputs.cap.softcap", "inputs.cap.rate"),
    Bug(
        "logp and logsumexp exchanged",
        "return logp, norm, lse, row_entropy\n",
        "return lse, norm, logp, row_entropy\n",
    ),
    Bug(
        "dtype code of BF16 and FP16 exchanged",
        "torch.bfloat16: 1, torch.float16: 2",
        "torch.bfloat16: 2, torch.float16: 1",
    ),
    Bug(
        "upstream gradients exchanged",
        "*(upstream.grad_logp, upstream.grad_logsumexp,",
        "*(upstream.grad_logsumexp, upstream.grad_logp,",
    ),
    Bug("upstream gradient of the entropy dropped", "upstream.grad_entropy is not None,", "False,"),
    Bug(
        "norm passed as the entropy",
        "upstream.norm if upstream.entropy is None else upstream.entropy",
        "upstream.norm",
    ),
    Bug("bias gradient not summed", "if dbias is not None:\n            kernel(", "if False:\n            kernel("),
    Bug("rows of the weight reversed in dH", "matmul(dz, weight, out", "matmul(dz, weight.flip(0), out"),
    Bug("rows of hidden reversed in dW", "matmul(dz.t(), hidden, out", "matmul(dz.t(), hidden.flip(0), out"),
)
"""Bugs that give wrong numbers."""

LAUNCHES = (
    Bug(
        "kept logits of another piece",
        "columns.start - first : columns.stop - first]",
        ": columns.stop - columns.start]",
    ),
    Bug("rows of kept logits as far apart as the piece is wide", "0 if kept is None else kept.stride(0)", "width"),
    Bug("half of the rows of kept logits", "-(-count // SUMMED), -(-width", "-(-count // (2 * SUMMED)), -(-width"),
    Bug("last kept columns missing", "-(-width // KEPT_COLUMNS)", "max(width // KEPT_COLUMNS, 1)"),
    Bug("kept from the first column on", "blocks, inputs.first_kept)", "blocks, 0)"),
    Bug("no boxes for kept logits", "shared=cut.shared(stores=keeps)", "shared=cut.shared(stores=False)"),
    Bug("boxes of kept logits in the stages", "stores=keeps or file == BACKWARD", "stores=file == BACKWARD"),
    Bug("kept logits of the first rows", "kept = None if self.kept is None else self.kept[rows]", "kept = self.kept"),
    Bug("chain of dH not continued", "matmul(dz, weight, out, continues=continues)", "matmul(dz, weight, out)"),
    Bug(
        "dH added to uninitialised memory",
        "matmul(dz, weight, out, continues=continues)",
        "matmul(dz, weight, out, continues=True)",
    ),
    Bug(
        "chain of dW not continued",
        "matmul(dz.t(), hidden, out, continues=continues)",
        "matmul(dz.t(), hidden, out)",
    ),
    Bug("operands of dH exchanged", "matmul(dz, weight, out,", "matmul(weight, dz, out,"),
    Bug("dz not transposed in dW", "matmul(dz.t(), hidden, out,", "matmul(dz, hidden, out,"),
    Bug("hidden gradient restarted at each piece", "continues=part.start > 0", "continues=False"),
    Bug("weight gradient restarted at each block", "in_turn = part.start > 0 or sums", "in_turn = sums"),
    Bug(
        "gradient of the first piece used for all",
        "*(sums, kept, dz, columns.start, width,",
        "*(sums, kept, dz, 0, width,",
    ),
    Bug("tiles of 64 rows for any number", "1 if count <= HEIGHT else 2", "1 if count <= 2 * HEIGHT else 2"),
    Bug("threads of the consumers alone", "(self.groups + 1) * WARPGROUP", "self.groups * WARPGROUP"),
    Bug("no room for the alignment of the swizzle", "+ self._boxes(stores) + ALIGNMENT", "+ self._boxes(stores)"),
    Bug("no room for boxes", "self.groups * BOXES if stores else 0", "0"),
    Bug("boxes of one consumer", "self.groups * BOXES if", "BOXES if"),
    Bug("one stage too many", "self._boxes(stores)) // STAGE\n", "self._boxes(stores)) // STAGE + 1\n"),
    Bug("stage of one operand", "STAGE = (HEIGHT + BLOCK) * SWIZZLE", "STAGE = BLOCK * SWIZZLE"),
    Bug(
        "more blocks than processors",
        "min(-(-count // self.rows) * across, processors(device))",
        "-(-count // self.rows) * across",
    ),
    Bug("states of blocks of another width", "parts = -(-vocab // (BLOCK * blocks))", "parts = -(-vocab // BLOCK)"),
    Bug(
        "no states for the last columns",
        "parts = -(-vocab // (BLOCK * blocks))",
        "parts = max(vocab // (BLOCK * blocks), 1)",
    ),
    Bug("one number per row for the norm", f"{NORM}(count, 2)", f"{NORM}(count, 1)"),
    Bug(
        "norm in the dtype of hidden",
        f"{NORM}(count, 2), dtype=torch.float32",
        f"{NORM}(count, 2), dtype=torch.bfloat16",
    ),
    Bug(
        "norm of the first rows used for all",
        "[value[rows] for value in _ordered(results)]",
        "[value[: block.hidden.shape[0]] for value in _ordered(results)]",
    ),
    Bug("states without weighted sums", "(parts, packing.STATE, count), dtype", "(parts, 2, count), dtype"),
    Bug("last rows are not finished", "-(-count * WARP // 256)", "max(count * WARP // 256, 1)"),
    Bug("one thread per row in finish, not one warp", "-(-count * WARP // 256)", "-(-count // 256)"),
    Bug("unaligned rows copied by TMA", "fits and x.data_ptr() % CHUNK == 0", "fits"),
    Bug("rows of any pitch copied by TMA", "x.stride(0) * size % CHUNK == 0 and", ""),
    Bug(
        "rows at multiples of 8 bytes copied by TMA",
        "x.stride(0) * size % CHUNK == 0",
        "x.stride(0) * size % 8 == 0",
    ),
    Bug("overlapping rows copied by TMA", " and x.stride(0) >= x.shape[1]", ""),
    Bug("strided columns copied by TMA", "fits = x.stride(1) == 1 and", "fits ="),
    Bug(
        "copy keeps the pitch of a single row",
        "torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)",
        "x.clone()",
    ),
    Bug(
        "ids not converted to 64 bits",
        "inputs.target_ids.to(torch.int64).contiguous()",
        "inputs.target_ids.contiguous()",
    ),
    Bug(
        "strided ids read as if contiguous",
        "inputs.target_ids.to(torch.int64).contiguous()",
        "inputs.target_ids.to(torch.int64)",
    ),
    Bug("strided bias read as if contiguous", "else inputs.bias.contiguous()", "else inputs.bias"),
    Bug(
        "strided temperatures read as if contiguous",
        "inputs.temperature.contiguous() if per_row",
        "inputs.temperature if per_row",
    ),
    Bug("expanded upstream gradient read as if contiguous", "grad if grad is None else grad.contiguous()", "grad"),
    Bug(
        "no room for the length of the tile order",
        "torch.empty(1 + -(-count // cut.rows)",
        "torch.empty(-(-count // cut.rows)",
    ),
    Bug(
        "tiles sorted by another height",
        "made = program(FORWARD, hidden.dtype, cut, entropy=False)",
        "made = program(FORWARD, hidden.dtype, Cut(1), entropy=False)",
    ),
    Bug("tile order stored in 64 bits", "dtype=torch.int32, device", "dtype=torch.int64, device"),
    Bug("tile order not sorted", "            sort.launch(", "            (lambda *_: None)("),
    Bug(
        "box of hidden for the whole tile",
        "tensor_map(hidden, (HEIGHT, INNER)",
        "tensor_map(hidden, (2 * HEIGHT, INNER)",
    ),
    Bug(
        "tensor map of hidden without the aligned copy",
        "Steps(), copyable(hidden)",
        "Steps(), hidden",
    ),
    Bug("dz rows not padded to whole blocks", "ceil_div(width, BLOCK) * BLOCK))[:, :width]", "width))"),
    Bug("sums over rows rounded down", "(-(-count // SUMMED), width)", "(max(count // SUMMED, 1), width)"),
    Bug(
        "sums over rows in the dtype of hidden",
        "width), dtype=torch.float32)\n        has_entropy",
        "width), dtype=hidden.dtype)\n        has_entropy",
    ),
    Bug(
        "last columns of the bias gradient missing", "launch(-(-width // 256), 256", "launch(max(width // 256, 1), 256"
    ),
    Bug("dbias terms of 64 rows", "SUMMED = 16", "SUMMED = 64"),
    Bug(
        "twice the row limit of a launch",
        "for rows in slices(inputs.hidden.shape[0], MOST_ROWS)",
        "for rows in slices(inputs.hidden.shape[0], 2 * MOST_ROWS)",
    ),
    Bug(
        "gradient compiled for tiles of 64 rows",
        "program(BACKWARD, hidden.dtype, cut",
        "program(BACKWARD, hidden.dtype, type(cut)(1)",
    ),
    Bug(
        "backward launched with the shared memory of the forward pass",
        "shared=cut.shared(stores=True)",
        "shared=cut.shared(stores=False)",
    ),
)
"""Bugs that only a recorded launch shows."""

SHARDS = (
    Bug("shard counted from column 0", "inputs.start, inputs.vocab", "0, inputs.vocab"),
    Bug("ids of other shards are bad", "inputs.start, inputs.vocab", "inputs.start, columns"),
    Bug("blocks exchanged as if they were units", "if formed.blocks == BLOCKS:", "if formed.blocks:"),
    Bug(
        "no states for the last unit",
        "merged = parts.new_empty((units(inputs.weight.shape[0]),",
        "merged = parts.new_empty((max(inputs.weight.shape[0] // 1024, 1),",
    ),
    Bug("last rows are not merged", "(-(-count // 256), merged.shape[0])", "(max(count // 256, 1), merged.shape[0])"),
    Bug("first unit merged alone", "(-(-count // 256), merged.shape[0])", "(-(-count // 256), 1)"),
    Bug("parts taken for blocks", "*_ordered(results), BLOCKS, 0)", "*_ordered(results), 1, 0)"),
    Bug(
        "twice the row limit of a launch for a shard",
        "for rows in slices(hidden.shape[0], MOST_ROWS)",
        "for rows in slices(hidden.shape[0], 2 * MOST_ROWS)",
    ),
    Bug("states of the last rows of a shard alone", "selected[rows] = chosen", "selected[: chosen.shape[0]] = chosen"),
    Bug("empty shard launched", "if weight.shape[0]:\n", "if True:\n"),
    Bug(
        "merge of 64 rows compiled for tiles of any",
        "torch.bfloat16, Cut.of(count), entropy=entropy)",
        "torch.bfloat16, Cut.of(count), entropy=False)",
    ),
)
"""Bugs of the two parts of the forward pass over shards, found in recorded launches."""

MUTANTS = (Mutants("cuda-sm90", MODULES, SHOWN),)
