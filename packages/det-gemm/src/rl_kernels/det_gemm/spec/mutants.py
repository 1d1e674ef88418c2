"""Bugs of det_gemm's native backend that the checker must catch: each is one edit of the source."""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants
from rl_kernels.det_gemm.spec import mutants_cuda, mutants_triton

ONE_PIECE = "            _columns(left, b, out, settings)\n            return out\n"
IN_TWO = "out.copy_(a[:, :STEP].float() @ b[:STEP].float() + a[:, STEP:].float() @ b[STEP:].float())"
PRODUCT = (
    Bug("bias added twice", "product += bias", "product += 2 * bias"),
    Bug("output rounded through BF16", "return product.to(wanted)", "return product.bfloat16().to(wanted)"),
    Bug(
        "last K step skipped",
        "left = _whole_terms(a, 1).contiguous()",
        "left = _whole_terms(a, 1).clone()\n    left[:, -STEP:] = 0",
    ),
    Bug("every piece holds the first columns", "b[:, part], out", "b[:, : out[:, part].shape[1]], out"),
    Bug("every block holds the first rows", "left[first:end]", "left[: end - first]"),
    Bug("last block of rows skipped", "in blocks(out.shape[0]):", "in blocks(out.shape[0])[:-1]:"),
    Bug(
        "library product of the rows as they are",
        ONE_PIECE,
        "            return torch.mm(a, b.to(dtype))\n",
    ),
    Bug("K split for few rows", ONE_PIECE, f"{ONE_PIECE[:-1]} if len(a) > 4 else {IN_TWO}\n"),
    Bug("K split for many rows", ONE_PIECE, f"{ONE_PIECE[:-1]} if len(a) < 128 else {IN_TWO}\n"),
    Bug(
        "padding not zeroed",
        "F.pad(x, [0, 0] * (x.ndim - 1 - dim % x.ndim) + [0, missing])",
        "torch.cat((x, *[torch.empty_like(x.narrow(dim, 0, 1))] * missing), dim)",
    ),
    Bug(
        "strides of b ignored",
        "right = _right(b, out.dtype)",
        "right = _right(b.as_strided(b.shape, (b.shape[1], 1)), out.dtype)",
    ),
    Bug(
        "output kept between calls",
        "out = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)",
        "out = globals().setdefault('kept', {}).setdefault((len(a), b.shape[1]), a.new_empty((len(a), b.shape[1]), "
        "dtype=dtype))",
    ),
)
CHAINS = "chain(a[:, first:end], b[first:end])"
SEGMENTS = (
    Bug("a segment begins 16 terms early", "min(i * length, size), min(", "min(max(i * length - 16, 0), size), min("),
    Bug("bias of a segmented product left out", "total = total + bias", "pass"),
    Bug("last segment left out", f"[{CHAINS} for first, end in cuts]", f"[{CHAINS} for first, end in cuts[:-1]]"),
)
ORDERS = (
    Bug("segments added in a chain", "total = tree_sum([", "total = sum(["),
    Bug("tree from the other end", "for first, end in cuts]", "for first, end in cuts[2:] + cuts[:2]]"),
    Bug("segments one step longer", "(STEP * segments)) * STEP", "(STEP * segments)) * STEP + STEP"),
    Bug("a segment is not reset", CHAINS, "chain(a[:, :end], b[:end]) - chain(a[:, :first], b[:first])"),
)
"""Other orders of the same sum: bits that only a comparison with the contract shows."""
ALL_STEPS = "                _steps(left, right, total)\n"
ONE_STEP = "total.addmm_(left[row : row + STEP].t(), right[row : row + STEP])"
WEIGHT_GRADIENT = (
    Bug("gradient not zeroed", "a.new_zeros(", "a.new_empty("),
    Bug(
        "gradient kept between calls, not reset",
        "total = a.new_zeros(",
        "total = vars(products).setdefault('kept', {}).setdefault((a.shape, dc.shape), torch.zeros((a.shape[1], "
        "dc.shape[1])))\n    a.new_zeros(",
    ),
    Bug("buffer overwritten", "products.chain_dw(a, dc, out)", "out.copy_(weight_gradient(a, dc, out.dtype))"),
    Bug("buffer added at the end", "products.chain_dw(a, dc, out)", "out.add_(weight_gradient(a, dc, out.dtype))"),
    Bug("buffer copied", "products.chain_dw(a, dc, out)", "products.chain_dw(a, dc, out.contiguous())"),
    Bug("one library product for all rows", ALL_STEPS, "                total.addmm_(left.t(), right)\n"),
    Bug(
        "rows of the last short step skipped",
        "return pad_to(torch.nn.functional.pad(x.float()",
        "x = x[: len(x) // STEP * STEP]\n    return pad_to(torch.nn.functional.pad(x.float()",
    ),
    Bug("steps of 32 rows", 'STEP = 16\n"""Terms added', 'STEP = 32\n"""Terms added'),
    Bug("steps in descending order", "in range(0, len(left), STEP):", "in reversed(range(0, len(left), STEP)):"),
    Bug("step rounded to BF16", ONE_STEP, f"total += ({ONE_STEP[13:-1].replace(', right', ' @ right')}).bfloat16()"),
    Bug("chain in BF16", "dtype=compute_dtype(a.dtype))", "dtype=torch.bfloat16)"),
)

MODULES = (
    "rl_kernels.core.rowwise",
    "rl_kernels.core.products",
    "rl_kernels.det_gemm.segments",
    "rl_kernels.det_gemm.backends.native",
)
MUTANTS = (
    Mutants("native", MODULES, (*PRODUCT, *SEGMENTS, *WEIGHT_GRADIENT)),
    *mutants_cuda.MUTANTS,
    *mutants_triton.MUTANTS,
)
