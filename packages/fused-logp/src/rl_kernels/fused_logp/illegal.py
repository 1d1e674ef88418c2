"""Calls of fused_logp that must raise: what is wrong with each, and what the message says about it."""

from __future__ import annotations

import torch

from rl_kernels.core.testing import IllegalCall, edited, given, illegal_ids, illegal_temperatures

ILLEGAL = (
    IllegalCall("logits not a tensor", given(logits=[1.0]), TypeError, "logits: expected a tensor"),
    IllegalCall("logits of integers", edited("logits", torch.Tensor.int), TypeError, "logits: expected dtype"),
    IllegalCall("logits without dims", given(logits=torch.tensor(1.0)), ValueError, "logits: expected at least 1 dims"),
    IllegalCall(
        "empty vocabulary", edited("logits", lambda x: x[..., :0]), ValueError, "logits: expected a vocabulary"
    ),
    IllegalCall(
        "row index out of range",
        lambda call: {**call, "row_indices": torch.tensor([10**6], device=call["token_ids"].device)},
        ValueError,
        r"row_indices: expected values in \[0",
    ),
    IllegalCall("row indices of floats", given(row_indices=torch.ones(2)), TypeError, "row_indices: expected dtype"),
    IllegalCall("out of another shape", given(out=torch.zeros(1)), ValueError, "out: expected shape"),
    IllegalCall("out of another dtype", given(out=torch.zeros(1).double()), TypeError, "out: expected dtype"),
    IllegalCall("unknown output_dtype", given(output_dtype=torch.int32), ValueError, "output_dtype: expected one of"),
    IllegalCall("unknown reduction", given(reduction="fast"), ValueError, "reduction: expected one of"),
    IllegalCall("unknown backend", given(backend="no-such"), ValueError, "backend: fused_logp has no backend"),
    IllegalCall("backend not a name", given(backend=3), TypeError, "backend: expected a name"),
    *illegal_ids("token_ids"),
    *illegal_temperatures("token_ids"),
)
