"""The argument ``min_logit``: logits z below a number of their row count as -inf, as top-k, top-p and min-p do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.observed import are_plain, ops_are_observed, values_hidden
from rl_kernels.core.torchlib.ops import define_check


def is_below(logp: torch.Tensor, min_logit: torch.Tensor) -> torch.Tensor:
    """Say of which rows the target is below ``min_logit``: the gradient of their log-probability counts as 0."""
    # Of a target that is masked, and kept by a threshold of -inf, it counts as it does without thresholds.
    return logp < min_logit.clamp(max=torch.finfo(min_logit.dtype).min)


def validate(value: object, leading: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
    """Require None, or a tensor of ``leading`` shape in ``dtype`` on ``device`` that does not require grad."""
    if value is None:
        return
    check.tensor("min_logit", value, (dtype,))
    assert isinstance(value, torch.Tensor)
    check.shape("min_logit", value, leading, "one value per token")
    if value.device != device:
        raise ValueError(f"min_logit: expected device {device}, got {value.device}")
    if value.requires_grad:
        raise ValueError("min_logit: expected a tensor that does not require grad: it gets no gradient")


def check_numbers(min_logit: torch.Tensor | None, target_ids: torch.Tensor, ignore_index: int | None) -> None:
    """Require that no threshold is NaN where the id, in a tensor of the same shape, is not ignored.

    Skipped under torch.compile and while a CUDA graph is captured.
    """
    if min_logit is not None and not values_hidden(min_logit):
        _check_numbers(min_logit, target_ids, ignore_index)


def check_targets(logp: torch.Tensor, min_logit: torch.Tensor, unbounded: Callable[[], torch.Tensor]) -> None:
    """Require that no target is below ``min_logit``. Costs a sync on a GPU, after the forward pass.

    Skipped under torch.compile and while a CUDA graph is captured.

    Args:
        logp: ``[N]``, of the targets, before it is cast; 0 where they are ignored.
        min_logit: ``[N]``.
        unbounded: returns ``[N]``, NaN where logits of the row are, such as logp without thresholds. Called only if a
            row is NaN or -inf: a row is NaN because nothing of it is kept, or because its logits are.

    Raises:
        ValueError: a target is below its threshold.
    """
    if values_hidden(logp):
        return
    plain = None
    if are_plain(logp, min_logit) and not ops_are_observed():
        if not bool((~(logp > -math.inf) & (min_logit > -math.inf)).any()):
            return
        plain = unbounded()
    _check_kept(logp, min_logit, plain)


def _require_numbers(value: torch.Tensor, target_ids: torch.Tensor, ignore_index: int | None) -> None:
    is_nan = value.isnan()
    if bool((is_nan if ignore_index is None else is_nan & (target_ids != ignore_index)).any()):
        raise ValueError("min_logit: expected numbers, got NaN")


def _require_kept(logp: torch.Tensor, min_logit: torch.Tensor, unbounded: torch.Tensor | None) -> None:
    found = is_below(logp, min_logit)
    if unbounded is not None:
        found |= logp.isnan() & ~unbounded.isnan()
    count = int(found.sum())
    if count:
        raise ValueError(
            f"target_ids: expected tokens whose logit is at least min_logit, {count} of {len(logp)} are below it; "
            "with validate=False they get a log-probability of -inf"
        )


_check_numbers = define_check("check_numbers", "(Tensor value, Tensor ids, int? ignore_index)", _require_numbers)
_check_kept = define_check("check_kept", "(Tensor logp, Tensor min_logit, Tensor? unbounded)", _require_kept)
