"""Bugs of the host code of fused_logp's CUDA backend, planted in copies of that code.

``SHOWN`` give wrong numbers, which the quick cases find on a GPU. ``LAUNCHES`` access memory that they must not, need
larger cases, or break a rule without changing a number; they are found in recorded launches, which run no kernel.
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

MODULES = ("rl_kernels.fused_logp.rows", "rl_kernels.fused_logp.backends.cuda.backend")
STRIDES = "strides = (stride * logits.itemsize for "

SHOWN = (
    Bug("temperature of the first row for all", "(scale, 1.0) if isinstance", "(None, float(scale[0])) if isinstance"),
    Bug("temperature missing", "(None, scale)\n", "(None, 1.0)\n"),
    Bug("ignore_index of 0 ignores nothing", "ignore_index is not None\n", "bool(ignore_index)\n"),
    Bug("every row is computed", "return ids, temperatures, marks,", "return ids, temperatures, None,"),
    Bug(
        "marks of the rows that are left out",
        "int8).index_fill_(0, row_indices, 1)",
        "int8).add_(1).index_fill_(0, row_indices, 0)",
    ),
    Bug(
        "entropy not computed",
        "logits.dtype, entropy=entropy)\n    if split",
        "logits.dtype, entropy=False)\n    if split",
    ),
    Bug(
        "upstream gradients exchanged",
        "entropy, grad_logp, grad_lse, grad_entropy)\n",
        "entropy, grad_lse, grad_logp, grad_entropy)\n",
    ),
    Bug("upstream gradient of the entropy dropped", "entropy=grad_entropy is not None", "entropy=False"),
    Bug(
        "logp and logsumexp exchanged",
        "logits, logp, norm, lse, row_entropy, parts",
        "logits, lse, norm, logp, row_entropy, parts",
    ),
)
"""Bugs that give wrong numbers."""

LAUNCHES = (
    Bug(
        "gradient written with the strides of logits",
        "for tensor in (logits, out) for",
        "for tensor in (logits, logits) for",
    ),
    Bug(
        "last columns have no gradient",
        "chunks = -(-vocab // (threads * COLUMNS))",
        "chunks = max(vocab // (threads * COLUMNS), 1)",
    ),
    Bug("every dtype compiled as FP32", 'defines = {"DTYPE": CODES[dtype]', 'defines = {"DTYPE": 0 * CODES[dtype]'),
    Bug(
        "dtype code of BF16 and FP16 exchanged",
        "torch.bfloat16: 1, torch.float16: 2",
        "torch.bfloat16: 2, torch.float16: 1",
    ),
    Bug("expanded upstream gradient read as if contiguous", "grad if grad is None else grad.contiguous()", "grad"),
    Bug("strided ids read as if contiguous", "return token_ids.contiguous(),", "return token_ids,"),
    Bug("ids converted to 32 bits", "token_ids.to(torch.int64)", "token_ids.to(torch.int32)"),
    Bug(
        "strided temperatures read as if contiguous",
        "temperature.contiguous() if temperature.ndim",
        "temperature if temperature.ndim",
    ),
    Bug("strides in elements", f"{STRIDES}stride in logits", "strides = (stride for stride in logits"),
    Bug("strides of the gradient in elements", f"{STRIDES}tensor in", "strides = (stride for tensor in"),
    Bug("strides exchanged", "count, *strides, vocab)\n", "count, *reversed([*strides]), vocab)\n"),
    Bug("last units have no warp", "-(-count * units // WARPS)", "count * units // WARPS"),
    Bug(
        "one warp a row in the grid of units",
        "per_unit.launch(-(-count * units // WARPS)",
        "per_unit.launch(-(-count // WARPS)",
    ),
    Bug(
        "last rows are not merged",
        "launch(-(-count // WARPS), WARPS * WARP, *arguments)\n        return",
        "launch(max(count // WARPS, 1), WARPS * WARP, *arguments)\n        return",
    ),
    Bug("segments counted as units", "return last * UNITS + min", "return last + min"),
    Bug(
        "units of a short last segment rounded down",
        "min(-(-(vocab - last * SEGMENT) // STEP), UNITS)",
        "min((vocab - last * SEGMENT) // STEP, UNITS)",
    ),
    Bug("no room for the states of a row", "shared=units * STATE)", "shared=STATE)"),
    Bug("WGMMA target for the plain kernels", "exact=False)\n    generic", "exact=True)\n    generic"),
    Bug(
        "twice the threads per row",
        "sharing(vocab * logits.itemsize) * WARP",
        "sharing(vocab * logits.itemsize) * 2 * WARP",
    ),
    Bug("split follows the columns alone", "units > 1 and count < SPLIT_BELOW", "units > 1"),
    Bug("long rows are not split", "units > MOST_UNITS or (", "("),
    Bug("room for the states of one row only", "(units, 3, count), dtype", "(units, 3, 1), dtype"),
    Bug("one number per row for the norm", "new_empty((count, 2), dtype", "new_empty((count, 1), dtype"),
    Bug("norm in the dtype of logits", "(count, 2), dtype=torch.float32", "(count, 2), dtype=logits.dtype"),
    Bug("states without weighted sums", "(units, 3, count), dtype", "(units, 2, count), dtype"),
    Bug(
        "states in the dtype of logits",
        "(units, 3, count), dtype=torch.float32",
        "(units, 3, count), dtype=logits.dtype",
    ),
    Bug("one chunk too many", "-(-vocab // (threads * COLUMNS))", "vocab // (threads * COLUMNS) + 1"),
    Bug(
        "grid of the gradient for one chunk",
        "launched.launch(count * chunks, threads",
        "launched.launch(count, threads",
    ),
)
"""Bugs that only a recorded launch shows."""

MUTANTS = (Mutants("cuda-generic", MODULES, SHOWN),)
