"""Bugs of the host code of linear_logp's backend ``cuda-sm90``, planted in copies of it.

``SHOWN`` give wrong numbers, which the quick cases show on a GPU; ``LAUNCHES`` read or write where they must not, need
larger cases, or break a rule that no number shows: they are planted where launches are recorded and none is made.
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

HOST = "backends.cuda_sm90"
MODULES = tuple(
    f"rl_kernels.linear_logp.{name}"
    for name in ("inputs", "backward", f"{HOST}.tiles", "products", f"{HOST}.backward", f"{HOST}.backend")
)
NORM = "len(inputs.hidden)\n    logp, norm = hidden.new_empty(count, dtype=torch.float32), hidden.new_empty("

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
        "logp[rows], norm[rows], lse[rows]",
        "lse[rows], norm[rows], logp[rows]",
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
        "norm of the row taken for its entropy",
        "upstream.norm if upstream.entropy is None else upstream.entropy",
        "upstream.norm",
    ),
    Bug("bias gradient not summed", "if dbias is not None:\n            kernel(", "if False:\n            kernel("),
    Bug("order of the operands of dW", "gemm.matmul(dz.t(), hidden, out", "gemm.matmul(dz.t(), hidden.flip(0), out"),
)
"""Their numbers are wrong."""

LAUNCHES = (
    Bug("hidden gradient begins anew with each piece", "continues=columns.start > 0", "continues=False"),
    Bug("weight gradient begins anew with each block", "continues=rows.start > 0 or main_grad", "continues=main_grad"),
    Bug("gradient of the first piece for all", "*(sums, columns.start, width)", "*(sums, 0, width)"),
    Bug("tiles of 64 rows for any number", "1 if count <= HEIGHT else 2", "1 if count <= 2 * HEIGHT else 2"),
    Bug("threads of the consumers alone", "(self.groups + 1) * WARPGROUP", "self.groups * WARPGROUP"),
    Bug("no room for the alignment of the swizzle", "+ self._boxes(file) + ALIGNMENT", "+ self._boxes(file)"),
    Bug("no room for boxes", "self.groups * BOXES if file == BACKWARD else 0", "0"),
    Bug("boxes of one consumer", "self.groups * BOXES if", "BOXES if"),
    Bug("one stage too many", "self._boxes(file)) // STAGE\n", "self._boxes(file)) // STAGE + 1\n"),
    Bug("stage of one operand", "STAGE = (HEIGHT + BLOCK) * SWIZZLE", "STAGE = BLOCK * SWIZZLE"),
    Bug(
        "more blocks than processors",
        "min(-(-count // self.rows) * units, processors(device))",
        "-(-count // self.rows) * units",
    ),
    Bug("states of blocks of another width", "parts = -(-vocab // (BLOCK * blocks))", "parts = -(-vocab // BLOCK)"),
    Bug(
        "no states for the last columns",
        "parts = -(-vocab // (BLOCK * blocks))",
        "parts = max(vocab // (BLOCK * blocks), 1)",
    ),
    Bug("one number a row for its norm", f"{NORM}(count, 2)", f"{NORM}(count, 1)"),
    Bug(
        "norm in the dtype of hidden", f"{NORM}(count, 2), dtype=torch.float32", f"{NORM}(count, 2), dtype=hidden.dtype"
    ),
    Bug("norm of the first rows for all", "logp[rows], norm[rows], lse", "logp[rows], norm[: len(block.hidden)], lse"),
    Bug("states without weighted sums", "(parts, 3, count), dtype", "(parts, 2, count), dtype"),
    Bug("last rows are not finished", "-(-count * WARP // 256)", "max(count * WARP // 256, 1)"),
    Bug("a thread a row finishes", "-(-count * WARP // 256)", "-(-count // 256)"),
    Bug("rows that begin anywhere are copied by the engine", "fits and x.data_ptr() % CHUNK == 0", "fits"),
    Bug("rows of any pitch are copied by the engine", "x.stride(0) * size % CHUNK == 0 and", ""),
    Bug(
        "rows at multiples of 8 bytes are copied by the engine",
        "x.stride(0) * size % CHUNK == 0",
        "x.stride(0) * size % 8 == 0",
    ),
    Bug("rows that overlap are copied by the engine", " and x.stride(0) >= x.shape[1]", ""),
    Bug("columns apart are copied by the engine", "fits = x.stride(1) == 1 and", "fits ="),
    Bug(
        "copy keeps the pitch of a single row",
        "torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)",
        "x.clone()",
    ),
    Bug("ids of 32 bits", "inputs.target_ids.to(torch.int64).contiguous()", "inputs.target_ids.contiguous()"),
    Bug("ids read as they lie", "inputs.target_ids.to(torch.int64).contiguous()", "inputs.target_ids.to(torch.int64)"),
    Bug("bias read as it lies", "else inputs.bias.contiguous()", "else inputs.bias"),
    Bug("temperatures read as they lie", "inputs.temperature.contiguous() if per_row", "inputs.temperature if per_row"),
    Bug("upstream gradient expanded, read as if contiguous", "grad if grad is None else grad.contiguous()", "grad"),
    Bug(
        "order of tiles without its length",
        "torch.empty(1 + -(-count // cut.rows)",
        "torch.empty(-(-count // cut.rows)",
    ),
    Bug(
        "tiles sorted by another height",
        "made = program(FORWARD, hidden.dtype, cut, entropy=False)",
        "made = program(FORWARD, hidden.dtype, Cut(1), entropy=False)",
    ),
    Bug("order of tiles of 64 bits", "dtype=torch.int32, device", "dtype=torch.int64, device"),
    Bug("order is not sorted", "            sort.launch(", "            (lambda *_: None)("),
    Bug(
        "box of hidden for the whole tile",
        "tensor_map(hidden, (HEIGHT, INNER)",
        "tensor_map(hidden, (2 * HEIGHT, INNER)",
    ),
    Bug(
        "map of hidden as it came",
        "hidden, width = copyable(block.hidden), columns",
        "hidden, width = block.hidden, columns",
    ),
    Bug("dz of any width", "-(-width // BLOCK) * BLOCK))[:, :width]", "width))"),
    Bug("sums over rows rounded down", "(-(-count // SUMMED), width)", "(max(count // SUMMED, 1), width)"),
    Bug(
        "sums over rows in the dtype of hidden",
        "width), dtype=torch.float32)\n        has_entropy",
        "width), dtype=hidden.dtype)\n        has_entropy",
    ),
    Bug("last columns of the bias gradient", "launch(-(-width // 256), 256", "launch(max(width // 256, 1), 256"),
    Bug("sums of the rows of a tile", "SUMMED = 16", "SUMMED = 64"),
    Bug(
        "states of all rows at once", "for rows in slices(count, MOST_ROWS)", "for rows in slices(count, 2 * MOST_ROWS)"
    ),
    Bug(
        "gradient in tiles of the forward pass",
        "program(BACKWARD, hidden.dtype, cut",
        "program(BACKWARD, hidden.dtype, type(cut)(1)",
    ),
    Bug("shared memory of the forward pass", "shared=cut.shared(BACKWARD)", "shared=cut.shared('')"),
)
"""What only a look at the launch shows."""

MUTANTS = (Mutants("cuda-sm90", MODULES, SHOWN),)
