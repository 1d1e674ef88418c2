"""Plausible bugs of a fused_logp kernel, planted in copies of the native backend; the checker must catch each."""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants
from rl_kernels.fused_logp.spec import mutants_cuda, mutants_triton

MODULES = ("rl_kernels.core.rowwise", "rl_kernels.fused_logp.backends.native")

_SOFTMAX = (
    Bug("maximum not subtracted", "top = x.amax(-1)", "top = torch.zeros_like(x[:, 0])"),
    Bug("maximum of the first segment alone", "top = x.amax(-1)", "top = x[:, :SEGMENT].amax(-1)"),
    Bug(
        "row summed by the library at once",
        "return _library_sum(x)",
        "return x.movedim(-1, 0).contiguous().sum(0)",
    ),
    Bug(
        "entropy as a difference of large numbers",
        "log_total - state.weighted / state.total)",
        "lse - (top / temperature[:, 0] + state.weighted / state.total))",
    ),
    Bug("logarithm of the probability", "torch.nan, logp)", "torch.nan, logp.exp().log())"),
    Bug(
        "a row of -inf has a logsumexp",
        "undefined = (state.top == -torch.inf) | (state.top + log_total).isnan()",
        "undefined = (state.top + log_total).isnan() & (state.top != -torch.inf)",
    ),
    Bug(
        "logsumexp rounded to BF16",
        "found.logsumexp, found.entropy]",
        "found.logsumexp.bfloat16().to(x.dtype), found.entropy]",
    ),
)
_ROWS = (
    Bug("ids off by one", "rowwise.select(x, ids)", "rowwise.select(x, ids + 1)"),
    Bug("every negative id is ignored, no other", "ids != ignore_index", "ids >= 0"),
    Bug("id one past the vocabulary accepted", "(ids < 0) | (ids >= size)", "(ids < 0) | (ids > size)"),
    Bug(
        "mask by a product",
        "torch.where(active if value.ndim == 1 else active[:, None], value, 0.0)",
        "value * active.view(-1, *[1] * (value.ndim - 1))",
    ),
    Bug("mask missing in backward", "torch.where(active, torch.nan, 0.0)", "torch.where(active, torch.nan, torch.nan)"),
    Bug(
        "row_indices ignored in backward",
        "_blocks(logits, row_indices):\n        x = logits[rows].to(temperature.dtype)\n        known",
        "_blocks(logits, None):\n        x = logits[rows].to(temperature.dtype)\n        known",
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
    Bug(
        "temperature missing in forward",
        "rowwise.finish(rowwise.softmax_state(x, scale,",
        "rowwise.finish(rowwise.softmax_state(x, scale / scale,",
    ),
    Bug(
        "temperature missing in backward",
        "return _divide(dz, temperature)",
        "return dz",
    ),
    Bug("gradient through logsumexp dropped", "if up.grad_logsumexp is not None:", "if False:"),
    Bug("gradient through entropy of the wrong sign", "dz -= surprise", "dz += surprise"),
)

MUTANTS = (Mutants("native", MODULES, (*_SOFTMAX, *_ROWS, *_OPTIONS)), *mutants_cuda.MUTANTS, *mutants_triton.MUTANTS)
