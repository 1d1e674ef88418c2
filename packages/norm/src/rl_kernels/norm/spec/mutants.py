"""Bugs of rms_norm's backends that the checker must catch: each is one edit of the source."""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants
from rl_kernels.norm.spec.mutants_triton import MUTANTS as TRITON

BUGS = (
    Bug("eps missing", "_mean(row * row).add_(eps)", "_mean(row * row)"),
    Bug("mean by a library", "mean = _mean(row) if", "mean = row.mean(-1) if"),
    Bug("squares by a library", "_mean(row * row)", "(row * row).mean(-1)"),
    Bug("offset missing", "row *= _scale(weight, offset, row.dtype)", "row *= weight.to(row.dtype)"),
    Bug("offset missing in the gradient", "upstream * _scale(weight, offset, stats.dtype)", "upstream * weight"),
    Bug("weight rounded with its offset", "weight.to(dtype) + offset if", "(weight + offset).to(dtype) if"),
    Bug("sum not rounded", "(x.to(dtype) + residual.to(dtype)).to(x.dtype).contiguous()", "x.to(dtype) + residual"),
    Bug("gradient of the sum lost", "dx += grad_sum.to(stats.dtype)", "pass"),
    Bug("mean of the gradient left", "dx -= _mean(pull)[:, None]", "pass"),
    Bug("projection left out", "pull - scaled * _mean(pull * scaled)[:, None]", "pull * 1"),
    Bug("mean not subtracted in the gradient", "(x.to(stats.dtype) - mean).mul_(inverse) if centred else ", ""),
    Bug("buffer overwritten", "_chain(terms, main_grad)", "_chain(terms, torch.zeros_like(main_grad))"),
    Bug("terms summed by a library", "    total = start.clone()\n", "    return start + terms.sum(0)\n"),
    Bug("steps counted from the last row", "pad_to(terms, 0, STEP)", "pad_to(terms.flip(0), 0, STEP).flip(0)"),
    Bug("bias in the wrong place", "row += bias.to(row.dtype)", "row += bias.to(row.dtype) * inverse[:, None]"),
)

CASES = (
    *(
        "plain",
        "residual",
        "residual-half",
        "gemma",
        "no-weight",
        "weight-of-another-dtype",
        "layer",
        "layer-residual",
        "layer-offset",
    ),
    *("pairs-0", "pairs-1", "pairs-2", "pairs-3", "batch-129", "hidden-1025"),
)
MUTANTS = (Mutants("native", ("rl_kernels.norm.backends.native",), BUGS, CASES), TRITON)
