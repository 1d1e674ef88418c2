"""Bugs that a writer of a fused_logp kernel might make, planted in copies of the native backend; none may escape."""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants
from rl_kernels.fused_logp import mutants_cuda, mutants_triton

MODULES = ("rl_kernels.core.rowwise", "rl_kernels.fused_logp.native")

_SOFTMAX = (
    Bug("maximum not subtracted", "top = z.amax(-1)", "top = torch.zeros_like(z[:, 0])"),
    Bug("maximum of the first segment alone", "top = z.amax(-1)", "top = z[:, :SEGMENT].amax(-1)"),
    Bug("running maximum never rises", "top = torch.maximum(left.top, right.top)", "top = left.top"),
    Bug("merge without rescaling", "scale = shift.exp()", "scale = torch.ones_like(shift)"),
    Bug(
        "merge makes NaN of a masked segment",
        "shift = torch.where(state.top == -torch.inf, 0.0, state.top - top)",
        "shift = state.top - top",
    ),
    Bug(
        "last segment skipped if of one column",
        "in z.split(rowwise.SEGMENT, 1))",
        "in z.split(rowwise.SEGMENT, 1) if part.shape[1] > 1 or z.shape[1] == 1)",
    ),
    Bug("split follows the rows", "z.split(rowwise.SEGMENT, 1)", "z.split(4096 if z.shape[0] > 4 else 2048, 1)"),
    Bug(
        "library sum in place of the tree",
        "x = F.pad(x, [0, width - x.shape[-1]])",
        "return x.movedim(-1, 0).contiguous().sum(0)",
    ),
    Bug(
        "entropy as a difference of large numbers",
        "log_total - state.weighted / state.total)",
        "lse - (state.top + state.weighted / state.total))",
    ),
    Bug("logarithm of the probability", "rowwise.select(z, ids) - lse)", "(rowwise.select(z, ids) - lse).exp().log())"),
    Bug(
        "a row of -inf has a logsumexp",
        "lse = torch.where(state.top == -torch.inf, torch.nan, state.top + log_total)",
        "lse = state.top + log_total",
    ),
    Bug("logsumexp rounded to BF16", "values = [torch", "lse = lse.bfloat16().to(z.dtype); values = [torch"),
)
_ROWS = (
    Bug("ids off by one", "rowwise.select(z, ids) - lse)", "rowwise.select(z, ids + 1) - lse)"),
    Bug("every negative id is ignored, no other", "ids != ignore_index", "ids >= 0"),
    Bug("id one past the vocabulary accepted", "(ids < 0) | (ids >= size)", "(ids < 0) | (ids > size)"),
    Bug("mask by a product", "torch.where(active, value, 0.0)", "value * active"),
    Bug("mask missing in backward", "torch.where(_active(known.ids, ignore_index)[:, None], dz, 0.0)", "dz"),
    Bug(
        "row_indices ignored in backward",
        "_blocks(logits, row_indices):\n        z = _scaled(logits, rows, temperature)\n        known",
        "_blocks(logits, None):\n        z = _scaled(logits, rows, temperature)\n        known",
    ),
    Bug("only the first block of indexed rows", ".split(height)", ".split(height)[:1]"),
    Bug("rows given twice overwritten twice", "(rows == done)", "(rows == -1)"),
    Bug("in-place backward leaves the other rows", "logits.masked_fill_(others", "_ = (others"),
    Bug("gradient not initialised", "grad = logits.new_zeros(logits.shape)", "grad = logits.new_empty(logits.shape)"),
    Bug(
        "gradient buffer kept between calls",
        "grad = logits.new_zeros(logits.shape)",
        "grad = globals().setdefault(str(logits.shape), logits.new_zeros(logits.shape))",
    ),
)
_OPTIONS = (
    Bug("temperature missing in forward", "return z / _column(temperature, rows, z)", "return z"),
    Bug(
        "temperature missing in backward",
        "rowwise.dlogits(z, known) / _column(",
        "rowwise.dlogits(z, known) + 0 * _column(",
    ),
    Bug("gradient through logsumexp dropped", "if up.grad_logsumexp is not None:", "if False:"),
    Bug("gradient through entropy of the wrong sign", "dz = dz - up.grad_entropy", "dz = dz + up.grad_entropy"),
)

MUTANTS = (Mutants("native", MODULES, (*_SOFTMAX, *_ROWS, *_OPTIONS)), *mutants_cuda.MUTANTS, *mutants_triton.MUTANTS)
