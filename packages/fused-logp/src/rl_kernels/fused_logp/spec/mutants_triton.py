"""Bugs of fused_logp's Triton kernels and host code, planted in copies of the backend; the checker must catch each.

They also run in Triton's interpreter, which is a thousand times slower, so a small case must show each one.
``LAUNCHES`` need large cases, or break a rule without changing a number; they are found in recorded launches.
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

MODULES = tuple(
    f"rl_kernels.fused_logp.{name}" for name in ("rows", "backends.triton.kernels", "backends.triton.backend")
)

KERNELS = (
    Bug(
        "mask of the last block off by one",
        "mask=whole + columns < width, other",
        "mask=whole + columns < width - 1, other",
    ),
    Bug("last block of a row skipped", "    if whole < width:\n", "    if whole + 1 < width:\n"),
    Bug("last column has no gradient", "here = columns < V\n", "here = columns < V - 1\n"),
    Bug(
        "gradient of a row that is left out not written",
        "tl.store(target, tl.zeros((WIDTH,), tl.float32).to(dtype), mask=here)",
        "pass",
    ),
    Bug(
        "id one past the vocabulary accepted, id 0 not",
        "inside = active & (id >= 0) & (id < V)",
        "inside = active & (id > 0) & (id <= V)",
    ),
    Bug("marks of row_indices not read", "if HAS_ROWS:\n", "if False:\n"),
    Bug("ignored ids not skipped", "if HAS_IGNORED:\n", "if False:\n"),
)
HOST = (
    Bug("entropy missing in the backward pass", "HAS_ENTROPY=grad_entropy is not None", "HAS_ENTROPY=False"),
    Bug(
        "upstream gradients exchanged",
        "for grad in (grad_logp, grad_logsumexp, grad_entropy)]",
        "for grad in (grad_logsumexp, grad_logp, grad_entropy)]",
    ),
    Bug("ignore_index of 0 ignores nothing", "HAS_IGNORED=ignore_index is not None", "HAS_IGNORED=bool(ignore_index)"),
    Bug("per-token temperature taken for one number", "PER_ROW=temperature.ndim > 0", "PER_ROW=False"),
    Bug("every row is computed", '"HAS_ROWS": row_indices is not None', '"HAS_ROWS": False'),
)

LAUNCHES = (
    Bug(
        "programs of the gradient rounded down",
        "(count, ceil_div(vocab, width))]",
        "(count, max(vocab // width, 1))]",
    ),
    Bug("segments rounded down", "segments = ceil_div(vocab, kernels", "segments = max(1, vocab // kernels"),
    Bug("one program for all segments", "forward_segments[(count, segments)]", "forward_segments[(count, 1)]"),
    Bug("last rows are not merged", "ceil_div(count, kernels.ROWS.value),)", "max(count // kernels.ROWS.value, 1),)"),
    Bug("wide loads at any address", "(logits.stride(0) | logits.data_ptr())", "logits.stride(0)"),
    Bug("wide loads of rows at any pitch", "(logits.stride(0) | logits.data_ptr())", "logits.data_ptr()"),
    Bug(
        "width of loads chosen by the address",
        '"WIDE": vocab % kernels.ALIGNED.value == 0',
        '"WIDE": logits.data_ptr() % 16 == 0',
    ),
    Bug("strided columns read as contiguous", "if logits.stride(1) == 1 and aligned", "if aligned"),
    Bug(
        "copy keeps the pitch of a single row",
        "torch.empty_like(logits, memory_format=torch.contiguous_format).copy_(logits)",
        "logits.clone()",
    ),
    Bug("stride taken before the copy", "sizes = (vocab, rows.stride(0)", "sizes = (vocab, logits.stride(0)"),
    Bug("expanded upstream gradient read as if contiguous", "grad.contiguous() for grad in", "grad for grad in"),
    Bug("strided ids read as if contiguous", "return token_ids.contiguous(),", "return token_ids,"),
    Bug(
        "strided temperatures read as if contiguous",
        "temperature.contiguous() if temperature.ndim",
        "temperature if temperature.ndim",
    ),
    Bug(
        "strides of the gradient used for the logits", "*logits.stride(), *out.stride()", "*out.stride(), *out.stride()"
    ),
    Bug("strided rows taken for contiguous", "UNIT=logits.stride(1) == out.stride(1) == 1", "UNIT=out.stride(1) == 1"),
    Bug("one number per row for the norm", "new_empty((count, 2), dtype", "new_empty((count, 1), dtype"),
    Bug("states without weighted sums", "(segments, 3, count), dtype", "(segments, 2, count), dtype"),
    Bug(
        "states in the dtype of logits",
        "(segments, 3, count), dtype=torch.float32",
        "(segments, 3, count), dtype=logits.dtype",
    ),
    Bug("many rows split into segments too", "segments == 1 or count >= SPLIT_BELOW", "segments == 1"),
)

CASES = ("temperature-per-token", "pad-token", "indexed", "one-entry")
MUTANTS = (Mutants("triton", MODULES, (*KERNELS, *HOST), CASES),)
