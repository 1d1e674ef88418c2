"""Calls of fused_logp that must raise: what is wrong with each, and part of its message."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_kernels.core.testing import IllegalCall, Inputs, edited, given, illegal_ids, illegal_temperatures
from rl_kernels.core.testing.spec import Change


def _two_rows(make: Callable[[torch.Tensor], Inputs]) -> Change:
    """Return a change to logits ``[2, 3]``, at any shape flags, with the arguments that ``make`` returns for them."""

    def change(call: Inputs) -> Inputs:
        logits = torch.zeros(2, 3, dtype=call["logits"].dtype, device=call["logits"].device)
        return {**call, "logits": logits, "token_ids": call["token_ids"].new_zeros(2), **make(logits)}

    return change


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
    IllegalCall(
        "out that shares storage",
        _two_rows(lambda logits: {"out": torch.zeros(1, device=logits.device).expand(2)}),
        ValueError,
        "out: expected elements with storage of their own",
    ),
    IllegalCall(
        "out that requires grad",
        _two_rows(lambda logits: {"out": torch.zeros(2, device=logits.device, requires_grad=True)}),
        ValueError,
        "out: expected a tensor that does not require grad",
    ),
    IllegalCall(
        "rows that share storage, overwritten",
        _two_rows(lambda logits: {"logits": logits[:1].expand(2, 3), "inplace_backward": True}),
        ValueError,
        "inplace_backward: logits: expected elements with storage of their own",
    ),
    IllegalCall("unknown output_dtype", given(output_dtype=torch.int32), ValueError, "output_dtype: expected one of"),
    IllegalCall("unknown backend", given(backend="no-such"), ValueError, "backend: fused_logp has no backend"),
    IllegalCall("backend not a name", given(backend=3), TypeError, "backend: expected a name"),
    *illegal_ids("token_ids"),
    *illegal_temperatures("token_ids"),
)
