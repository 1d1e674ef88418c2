"""Bugs of linear_logp's Triton kernels and of their host code, planted in copies of the backend; none may escape.

They run in Triton's interpreter too, a thousand times as slow, so each is one that a small case shows.
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

MODULES = tuple(f"rl_kernels.linear_logp.{name}" for name in ("inputs", "backward", "triton_kernels", "triton_backend"))

KERNELS = (
    Bug(
        "columns beyond the vocabulary counted",
        'x = tl.where((columns < V)[None, :], x, float("-inf"))',
        'x = tl.where((columns < V + 1)[None, :], x, float("-inf"))',
    ),
    Bug(
        "id one past the vocabulary accepted, id 0 not",
        "return tl.where((id >= 0) & (id < V), id, -1)",
        "return tl.where((id > 0) & (id <= V), id, -1)",
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
        "end = tl.minimum(begin + SEGMENT // BLOCK, units)",
        "end = tl.minimum(begin + 1, units)",
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
        "target counted from the first piece", "column = _column(id, V) - begin", "column = _column(id, V) - begin + 1"
    ),
    Bug("bias gradient of the first tile of rows", "for tile in range(tiles):", "for tile in range(1):"),
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
HOST = (
    Bug("temperature taken for one number", '{"PER_ROW": inputs.temperature.ndim > 0', '{"PER_ROW": False'),
    Bug(
        "upstream gradients exchanged",
        "for grad in (grad_logp, grad_logsumexp, grad_entropy))",
        "for grad in (grad_logsumexp, grad_logp, grad_entropy))",
    ),
    Bug(
        "weight gradient of rows in the other order",
        "gemm.matmul(dz.t(), hidden, out, continues",
        "gemm.matmul(dz.t(), hidden.flip(0), out, continues",
    ),
    Bug(
        "hidden gradient on top of what was there",
        "gemm.matmul(dz, weight, out, continues=continues",
        "gemm.matmul(dz, weight, out, continues=True",
    ),
    Bug("units rounded down", "units = triton.cdiv(vocab, width)\n", "units = max(vocab // width, 1)\n"),
)
CASES = ("bias", "temperature-per-token", "odd", "pad-token", "blocks")

MUTANTS = (Mutants("triton", MODULES, (*KERNELS, *HOST), CASES),)
