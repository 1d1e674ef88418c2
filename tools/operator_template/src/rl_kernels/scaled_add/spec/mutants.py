"""Bugs of scaled_add's backends that the checker must catch; each is one edit of the source."""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

BUGS = (
    Bug("scale missing", "(x.to(scale.dtype) + scale * y", "(x.to(scale.dtype) + y"),
    Bug("scale missing in the gradient", "(scale * upstream.to(scale.dtype))", "(upstream.to(scale.dtype))"),
    Bug("term rounded on the way", "scale * y.to(scale.dtype))", "scale * y.bfloat16().to(scale.dtype))"),
    Bug("output not written", ".to(x.dtype).contiguous()", ".to(x.dtype).new_empty(x.shape)"),
    Bug("gradient depends on rows", "upstream.contiguous().clone()", "upstream * (1 + 2e-7 * (len(upstream) % 2))"),
)

MUTANTS = (Mutants("native", ("rl_kernels.scaled_add.backends.native",), BUGS),)
