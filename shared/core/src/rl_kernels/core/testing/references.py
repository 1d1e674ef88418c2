"""Reference definitions of the parts of RL losses, and a measure of how far two results differ.

They compute in FP32, or in FP64 for FP64 inputs: call them on FP64 tensors for a gold. Masked positions are replaced
before anything is computed from them, so that NaN there reaches neither values nor gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.ulps import bits_of


def selected_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, mask: torch.Tensor | None = None, temperature: float = 1.0
) -> torch.Tensor:
    """Return ``log_softmax(logits / temperature)[id]``, 0 at masked positions.

    Args:
        logits: ``[..., V]``, floating.
        token_ids: ``[...]``, integers in ``[0, V)`` wherever the mask is True.
        mask: ``[...]``, bool; None is all True.
        temperature: > 0.
    """
    active = _active(token_ids, mask)
    z = torch.where(active[..., None], _to_compute_dtype(logits), 0.0) / temperature
    ids = torch.where(active, token_ids, 0).long()
    logp = torch.log_softmax(z, -1).gather(-1, ids[..., None])[..., 0]
    return torch.where(active, logp, 0.0)


def masked_sum(values: torch.Tensor, mask: torch.Tensor | None = None, dim: int | None = None) -> torch.Tensor:
    """Return the sum of ``values`` where ``mask`` (bool, of the same shape) is True, over ``dim`` or over all."""
    return torch.where(_active(values, mask), _to_compute_dtype(values), 0.0).sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor | None = None, dim: int | None = None) -> torch.Tensor:
    """Return the mean of ``values`` where ``mask`` is True, over ``dim`` or over all; 0 where all is masked."""
    return masked_sum(values, mask, dim) / _active(values, mask).sum(dim).clamp(min=1)


def policy_ratio(current: torch.Tensor, old: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``exp(current - old)`` of two tensors of log-probabilities; 1 at masked positions, with zero gradient."""
    return _difference(current, old, mask).exp()


def reference_kl(current: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the k3 estimate ``exp(e) - e - 1``, ``e = ref - current``; 0 at masked positions, with zero gradient.

    Written ``expm1(e) - e``; the relative error is about ``2 eps / |e|``, so a gold for small e needs FP64 inputs.
    """
    e = _difference(ref, current, mask)
    return e.expm1() - e


class Drift(NamedTuple):
    """Difference between a candidate and a reference, over the elements compared.

    Attributes:
        max_abs: largest difference; 0 where the bits are equal, NaN if elements differ and one of them is NaN.
        mean_abs: mean difference; 0 if nothing was compared.
        mismatched: number of elements whose bits differ: +0 and -0 differ, NaNs of equal bits do not.
        compared: number of elements compared.
    """

    max_abs: float
    mean_abs: float
    mismatched: int
    compared: int


def drift(candidate: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor | None = None) -> Drift:
    """Compare two floating tensors of one shape and dtype, where ``mask`` (bool, of that shape) is True.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if candidate.shape != reference.shape:
        raise ValueError(f"candidate: expected shape {tuple(reference.shape)}, got {tuple(candidate.shape)}")
    if candidate.dtype != reference.dtype:
        raise ValueError(f"candidate: expected dtype {reference.dtype}, got {candidate.dtype}")
    active = _active(reference, mask)
    left, right = candidate.detach()[active], reference.detach()[active]
    unlike = bits_of(left) != bits_of(right)
    if not unlike.any():
        return Drift(0.0, 0.0, 0, left.numel())
    # Subtracting equal infinities would give NaN.
    error = torch.where(unlike, left.double() - right.double(), 0.0).abs()
    return Drift(float(error.max()), float(error.mean()), int(unlike.sum()), left.numel())


def _difference(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return torch.where(_active(a, mask), _to_compute_dtype(a) - _to_compute_dtype(b), 0.0)


def _to_compute_dtype(value: torch.Tensor) -> torch.Tensor:
    return value if value.dtype == torch.float64 else value.float()


def _active(value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return torch.ones_like(value, dtype=torch.bool)
    if mask.dtype != torch.bool or mask.shape != value.shape:
        expected = f"expected a bool tensor of shape {tuple(value.shape)}"
        raise ValueError(f"mask: {expected}, got {mask.dtype} of shape {tuple(mask.shape)}")
    return mask
