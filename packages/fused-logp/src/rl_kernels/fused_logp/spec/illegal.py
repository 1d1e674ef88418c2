"""Calls of fused_logp that must raise: a label of the error in each, and part of its message."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from rl_kernels.core.testing import IllegalCall, Inputs, edited, given
from rl_kernels.core.testing.spec import Change
from rl_kernels.lab.check.illegal import (
    Row,
    illegal_backends,
    illegal_ids,
    illegal_temperatures,
    illegal_thresholds,
)


def _two_rows(make: Callable[[torch.Tensor], Inputs]) -> Change:
    """Return a change to logits ``[2, 3]``, at any shape flags, with the arguments that ``make`` returns for them."""

    def change(call: Inputs) -> Inputs:
        logits = torch.zeros(2, 3, dtype=call["logits"].dtype, device=call["logits"].device)
        return {**call, "logits": logits, "target_ids": call["target_ids"].new_zeros(2), **make(logits)}

    return change


def _rows() -> Iterator[Row]:
    """Yield the fields of the calls that are this operator's own."""
    own, far = "expected elements with storage of their own", torch.tensor([10**6])
    yield "logits not a tensor", given(logits=[1.0]), TypeError, "logits: expected a tensor"
    yield "logits of integers", edited("logits", torch.Tensor.int), TypeError, "logits: expected dtype"
    yield "logits without dims", given(logits=torch.tensor(1.0)), ValueError, "logits: expected at least 1 dims"
    yield "empty vocabulary", edited("logits", lambda x: x[..., :0]), ValueError, "logits: expected a vocabulary"
    here = _two_rows(lambda logits: {"row_indices": far.to(logits.device)})
    yield "row index out of range", here, ValueError, r"row_indices: expected values in \[0"
    yield "row indices of floats", given(row_indices=torch.ones(2)), TypeError, "row_indices: expected dtype"
    yield "out of another shape", given(out=torch.zeros(1)), ValueError, "out: expected shape"
    yield "out of another dtype", given(out=torch.zeros(1).double()), TypeError, "out: expected dtype"
    expanded = _two_rows(lambda logits: {"out": torch.zeros(1, device=logits.device).expand(2)})
    yield "out that shares storage", expanded, ValueError, f"out: {own}"
    leaf = _two_rows(lambda logits: {"out": torch.zeros(2, device=logits.device, requires_grad=True)})
    yield "out that requires grad", leaf, ValueError, "out: expected a tensor that does not require grad"
    shared = _two_rows(lambda logits: {"logits": logits[:1].expand(2, 3), "inplace_backward": True})
    yield "rows that share storage, overwritten", shared, ValueError, f"inplace_backward: logits: {own}"
    yield "unknown out_dtype", given(out_dtype=torch.int32), ValueError, "out_dtype: expected one of"
    yield from illegal_backends("fused_logp")


ILLEGAL = (
    *(IllegalCall(*row) for row in _rows()),
    *illegal_ids("target_ids"),
    *illegal_temperatures("target_ids"),
    *illegal_thresholds("target_ids"),
)
