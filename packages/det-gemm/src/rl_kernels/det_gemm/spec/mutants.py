"""Bugs of det_gemm's native backend that the checker must catch: each is one edit of the source."""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants
from rl_kernels.det_gemm.spec import mutants_cuda, mutants_triton

MAINLOOP = ".double().contiguous() @ slab"
PRODUCT = (
    Bug("bias added twice", "product += bias", "product += 2 * bias"),
    Bug("output rounded through BF16", "return product.to(out_dtype)", "return product.bfloat16().to(out_dtype)"),
    Bug("last K step skipped", MAINLOOP, "[:, :-STEP].double().contiguous() @ slab[:-STEP]"),
    Bug("K beyond one segment skipped", MAINLOOP, "[:, :SEGMENT].double().contiguous() @ slab[:SEGMENT]"),
    Bug("every slab holds the first columns", "slab_of(slice(column, column + width))", "slab_of(slice(0, width))"),
    Bug("every block holds the first rows", "left[row : row + BLOCK]", "left[:BLOCK]"),
    Bug("last block of rows skipped", "range(0, m, BLOCK)", "range(0, max(m - BLOCK, 1), BLOCK)"),
    Bug(
        "library product of the rows as they are",
        "left[row : row + BLOCK].double().contiguous() @ slab",
        "a[row : row + BLOCK].float() @ slab[: a.shape[1]].float()",
    ),
    Bug(
        "K split for few rows",
        MAINLOOP,
        f"{MAINLOOP} if m > 4 else (left[row : row + BLOCK, :STEP].double() @ "
        "slab[:STEP]).float() + (left[row : row + BLOCK, STEP:].double() @ slab[STEP:]).float()",
    ),
    Bug(
        "K split for many rows",
        MAINLOOP,
        f"{MAINLOOP} if m < 128 else (left[row : row + BLOCK, :STEP].double() @ "
        "slab[:STEP]).float() + (left[row : row + BLOCK, STEP:].double() @ slab[STEP:]).float()",
    ),
    Bug(
        "padding not zeroed",
        "F.pad(x, [0, 0] * (x.ndim - 1 - dim % x.ndim) + [0, missing])",
        "torch.cat((x, *[torch.empty_like(x.narrow(dim, 0, 1))] * missing), dim)",
    ),
    Bug("strides of b ignored", "_slab(b[:, columns])", "_slab(b.as_strided(b.shape, (b.shape[1], 1))[:, columns])"),
    Bug(
        "output kept between calls",
        "out = a.new_empty((m, n), dtype=compute_dtype(a.dtype))",
        "out = globals().setdefault('kept', {}).setdefault((m, n), a.new_empty((m, n), dtype=torch.float32))",
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
WEIGHT_GRADIENT = (
    Bug("gradient not zeroed", "a.new_zeros(", "a.new_empty("),
    Bug(
        "gradient kept between calls, not reset",
        "total = a.new_zeros(",
        "total = vars(rowwise).setdefault('kept', {}).setdefault((a.shape, dc.shape), torch.zeros((a.shape[1], "
        "dc.shape[1])))\n    a.new_zeros(",
    ),
    Bug("buffer overwritten", "rowwise.chain_dw(a, dc, out)", "out.copy_(weight_gradient(a, dc, out.dtype))"),
    Bug("buffer added at the end", "rowwise.chain_dw(a, dc, out)", "out.add_(weight_gradient(a, dc, out.dtype))"),
    Bug("buffer copied", "rowwise.chain_dw(a, dc, out)", "rowwise.chain_dw(a, dc, out.contiguous())"),
    Bug(
        "one library product for all rows",
        "for column in range(0, out.shape[1], SLAB):",
        "out += (a.double().t() @ dc.double()).to(out.dtype)\n    for column in range(0):",
    ),
    Bug(
        "rows of the last short step skipped", "range(0, a.shape[0], STEP)", "range(0, a.shape[0] // STEP * STEP, STEP)"
    ),
    Bug("steps of 32 rows", 'STEP = 16\n"""Terms added', 'STEP = 32\n"""Terms added'),
    Bug("steps in descending order", "range(0, a.shape[0], STEP)", "reversed(range(0, a.shape[0], STEP))"),
    Bug("step rounded to BF16", ".to(total.dtype)\n", ".bfloat16()\n"),
    Bug("chain in BF16", "dtype=rowwise.compute_dtype(a.dtype))", "dtype=torch.bfloat16)"),
    Bug("last slab of columns skipped", "range(0, out.shape[1], SLAB)", "range(0, max(out.shape[1] - SLAB, 1), SLAB)"),
)

MODULES = ("rl_kernels.core.rowwise", "rl_kernels.det_gemm.segments", "rl_kernels.det_gemm.backends.native")
MUTANTS = (
    Mutants("native", MODULES, (*PRODUCT, *SEGMENTS, *WEIGHT_GRADIENT)),
    *mutants_cuda.MUTANTS,
    *mutants_triton.MUTANTS,
)
