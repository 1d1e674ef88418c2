"""Bugs of fused_logp's Triton kernels and of their host code, planted in copies of the backend; none may escape.

They run in Triton's interpreter too, a thousand times as slow, so each is one that a small case shows.
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

MODULES = tuple(f"rl_kernels.fused_logp.{name}" for name in ("rows", "triton_kernels", "triton_backend"))

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
    Bug("marks not read", "if HAS_ROWS:\n", "if False:\n"),
    Bug("ignored ids not looked at", "if HAS_IGNORED:\n", "if False:\n"),
    Bug(
        "columns of the selected logit counted in a program",
        "dlogits(x, columns == id,",
        "dlogits(x, tl.arange(0, WIDTH) == id,",
    ),
    Bug("gradient of a strided row read as contiguous", "columns.to(tl.int64) * column_stride", "columns.to(tl.int64)"),
)
HOST = (
    Bug("entropy missing in the backward pass", "HAS_ENTROPY=grad_entropy is not None", "HAS_ENTROPY=False"),
    Bug(
        "upstream gradients exchanged",
        "for grad in (grad_logp, grad_logsumexp, grad_entropy)]",
        "for grad in (grad_logsumexp, grad_logp, grad_entropy)]",
    ),
    Bug(
        "programs of the gradient rounded down",
        "kernels.backward[(count, triton.cdiv(vocab, width))]",
        "kernels.backward[(count, max(vocab // width, 1))]",
    ),
    Bug("ignore_index of 0 ignores nothing", "HAS_IGNORED=ignore_index is not None", "HAS_IGNORED=bool(ignore_index)"),
    Bug("temperature taken for one number", "PER_ROW=temperature.ndim > 0", "PER_ROW=False"),
    Bug("every row is computed", '"HAS_ROWS": row_indices is not None', '"HAS_ROWS": False'),
)

CASES = ("temperature-per-token", "ignored", "indexed", "one-entry")
MUTANTS = (Mutants("triton", MODULES, (*KERNELS, *HOST), CASES),)
