"""Bugs of rms_norm's Triton backend, in kernels, host code and launches, for the checker and recorded launches."""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

MODULES = ("rl_kernels.norm.backends.triton.kernels", "rl_kernels.norm.backends.triton.backend")

BUGS = (
    Bug("mean over the tile", "tl.full([x.shape[0]], D, tl.float32)", "tl.full([x.shape[0]], x.shape[1], tl.float32)"),
    Bug(
        "columns behind the row not zero", "tl.where(inside[None, :], x - spread(mean, x), 0.0)", "x - spread(mean, x)"
    ),
    Bug("eps missing", "mean_of(product(x, x), D) + eps", "mean_of(product(x, x), D)"),
    Bug("offset missing", "columns(WEIGHT, d, inside, x) + offset", "columns(WEIGHT, d, inside, x)"),
    Bug(
        "bias times the inverse",
        "x + columns(BIAS, d, inside, x)",
        "x + product(columns(BIAS, d, inside, x), spread(inverse, x))",
    ),
    Bug("norm of x without the residual", "        x = total.to(tl.float32)\n", ""),
    Bug("gradient of the sum lost", "dx = dx + of_sum", "dx = dx * 1.0"),
    Bug("projection left out", "fma(-x, spread(shared, x), pull)", "pull"),
    Bug("mean of the gradient left", "dx = dx - spread(mean_of(pull, D), dx)", "dx = dx * 1.0"),
    Bug("mean of another row", "tl.load(STATS + count + rows, mask", "tl.load(STATS + count + rows // 2, mask"),
    Bug("buffer overwritten", "    if CONTINUED:", "    if False:"),
    Bug("last parts left out", "range(full * AHEAD, count, REST)", "range(full * AHEAD, count - REST, REST)"),
    Bug("parts beyond the last", "tl.load(place, mask=there, other=0.0)", "tl.load(place, mask=there, other=1.0)"),
)
"""Bugs that the interpreter or a GPU shows."""
CASES = (
    "plain",
    "residual",
    "gemma",
    "layer",
    "layer-residual",
    "layer-offset",
    "batch-2049",
    "hidden-33",
    "hidden-4096",
)

MANY = (
    Bug(
        "last tile of rows alone", "of_weight += tl.sum(product(grad, x), 0)", "of_weight = tl.sum(product(grad, x), 0)"
    ),
    Bug(
        "tiles beside the sum of a step",
        "                inner += tl.load(place, mask",
        "                total += tl.load(place, mask",
    ),
    Bug("steps of other tiles", "rows = part * PER + first", "rows = part * ROWS + first"),
)
"""Bugs that only many steps show."""
HOST = (
    Bug("a program short", "(ceil_div(count, rows),)", "(count // rows,)"),
    Bug("programs short", "programs = ceil_div(count, per)", "programs = max(count // per, 1)"),
    Bug("tiles where steps are many", "per = rows if ceil_div(count, step) <= FEW_STEPS else step", "per = rows"),
    Bug("steps where they are few", "per = rows if ceil_div(count, step) <= FEW_STEPS else step", "per = step"),
    Bug("tiles chained as steps", "AHEAD, step // per, is_continued", "AHEAD, 1, is_continued"),
    Bug("stages without the gradient of the sum", "rows, x, grad, grad_sum)", "rows, x, grad)"),
    Bug("more stages than fit", "(STAGES - 1) * size <= STAGE_BYTES", "True"),
    Bug(
        "tile follows the rows",
        "width, rows, step, warps = tile(size)\n    per",
        "width, rows, step, warps = tile(min(size, count))\n    per",
    ),
    Bug("buffer's stride ignored", "programs, out.stride(0), size", "programs, 1, size"),
    Bug("bias continued too", "(dbias, parts[1], False)", "(dbias, parts[1], continued)"),
    Bug("buffer not continued", "(dweight, parts[0], continued)", "(dweight, parts[0], False)"),
    Bug("rows read as they lie", "x is None or (x.is_contiguous() and x.data_ptr() % ALIGNED == 0)", "True"),
    Bug("alignment not looked at", "x.is_contiguous() and x.data_ptr() % ALIGNED == 0", "x.is_contiguous()"),
    Bug("columns short", "(ceil_div(size, COLUMNS),)", "(max(size // COLUMNS, 1),)"),
    Bug(
        "bias in place of the weight",
        "_canonical(weight), _canonical(bias), output",
        "_canonical(bias), _canonical(weight), output",
    ),
    Bug("eps and offset exchanged", "(count, eps, offset, size", "(count, offset, eps, size"),
)
"""Bugs that recorded launches show."""
MUTANTS = Mutants("triton", MODULES, BUGS, CASES)
