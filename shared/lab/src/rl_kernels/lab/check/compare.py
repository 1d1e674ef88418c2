"""Compare numbers: two rules of accuracy against a gold, and equality of bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import nan

import torch

from rl_kernels.core.contract import Tolerance
from rl_kernels.core.testing import Case, Inputs, Spec, bits_of

FACTORS = {"forward": 2.0, "gradient": 3.0}
"""Largest error of a candidate, in errors of plain eager PyTorch (the relative rule)."""
ROUNDING = 4 * 2.0**-24
"""Allowed error of a sum by FP32 rounding, as a share of the sum of its terms' magnitudes."""
DEVIATIONS = 6
"""Allowed error of a result by its rounded intermediate values, in standard deviations; one in 5e8 is larger."""
ROUNDING_FP64 = 64 * 2.0**-53
"""``ROUNDING`` of FP64 results. The gold is rounded too then: it sums thousands of terms in another order."""


@dataclass(frozen=True)
class Comparison:
    """The result of one comparison.

    Attributes:
        passed: whether it passed.
        max_abs: largest absolute error; NaN where nothing was measured.
        mean_abs: mean absolute error.
        max_rel: largest relative error.
        message: description of the error; empty if it passed.
        share: share of the fence that the result needs, beyond the allowed rounding; NaN where there is no fence.
        worst: the element with the largest error, or the first that differs in bits.
        traceback: traceback of the exception that the candidate raised, if it did.
    """

    passed: bool
    max_abs: float = nan
    mean_abs: float = nan
    max_rel: float = nan
    message: str = ""
    worst: str = ""
    traceback: str = ""
    share: float = nan


def described(candidate: object, expected: torch.Tensor) -> str | None:
    """Return how a result differs from the expected one in type, shape, dtype or device, or None."""
    if not isinstance(candidate, torch.Tensor):
        return f"expected a tensor, got {type(candidate).__name__}"
    if candidate.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(candidate.shape)}"
    if candidate.dtype != expected.dtype:
        return f"expected dtype {expected.dtype}, got {candidate.dtype}"
    if candidate.device != expected.device:
        return f"expected device {expected.device}, got {candidate.device}"
    return None


def accuracy(
    candidate: torch.Tensor,
    eager: torch.Tensor,
    gold: torch.Tensor,
    magnitude: torch.Tensor,
    tolerance: Tolerance,
    direction: str,
    rounding: float = ROUNDING,
    *,
    calibrated: bool = True,
    row: Tolerance | None = None,
) -> Comparison:
    """Check a result against the contract's fence and the relative rule.

    Args:
        candidate: the result.
        eager: plain PyTorch of the same dtype, whose error sets the scale; it also gives shape and dtype.
        gold: the definition in FP64.
        magnitude: for each element, the FP64 sum of the magnitudes of its terms.
        tolerance: the contract's row.
        direction: ``forward`` or ``gradient``.
        rounding: allowed rounding error of a result, as a share of ``magnitude``.
        calibrated: whether plain PyTorch is known to stay inside the fence; if not, the fence is widened to allow for
            its error.
        row: the tolerance that ``share`` is measured by, if not the one that applies.
    """
    wrong = described(candidate, eager)
    if wrong:
        return Comparison(False, message=wrong)
    if not gold.numel():
        return Comparison(False, message="an empty result proves nothing")
    value = candidate.double()
    # A value that rounds to more than the largest number becomes infinite.
    largest = torch.finfo(eager.dtype).max * (1 + torch.finfo(eager.dtype).eps / 4)
    gold = torch.where(gold.abs() > largest, gold.sign() * torch.inf, gold)
    special = ~gold.isfinite()
    if not _same_special(value, gold, special):
        differ = torch.where(gold.isnan(), ~value.isnan(), value != gold) & (special | ~value.isfinite())
        place = _at(differ, candidate, gold)
        return Comparison(False, message=f"NaN or inf in one but not the other: {place}", worst=place)
    error = torch.where(special, 0.0, value - gold).abs()
    finite = torch.where(special, 0.0, gold)
    slack = ulp(finite, eager.dtype) + rounding * torch.where(special, 0.0, magnitude)
    plain = torch.where(special, 0.0, eager.double() - gold).abs()
    factor = FACTORS[direction]
    fence, granted = fence_of(tolerance, finite, slack), slack / 2
    if not calibrated:
        fence, granted = (limit.clamp(min=float(factor * plain.nan_to_num().max())) for limit in (fence, granted))
    share_row = tolerance if row is None else row
    needed = torch.where(error <= granted, 0.0, (error - slack / 2) / (share_row.atol + share_row.rtol * finite.abs()))
    share = float(needed.max())
    limits = {
        "outside the contract's fence": fence,
        f"worse than {factor:g}x the worst element of eager PyTorch": factor * plain.nan_to_num().max() + slack,
    }
    relative = torch.where(finite == 0, 0.0, error / finite.abs())
    numbers = float(error.max()), float(error.mean()), float(relative.max())
    worst = _at(error == error.max(), candidate, gold)
    for rule, limit in limits.items():
        broken = error > limit
        if broken.any():
            off = f"off by {float(error[broken][0]):.3g}, allowed {float(limit[broken][0]):.3g}"
            return Comparison(False, *numbers, f"{rule}: {_at(broken, candidate, gold)}, {off}", worst, share=share)
    budget = factor * plain.nan_to_num().norm() + slack.norm()
    if error.norm() > budget:
        message = f"L2 error {error.norm():.3g} over {budget:.3g} (relative rule)"
        return Comparison(False, *numbers, message, worst, share=share)
    return Comparison(True, *numbers, worst=worst, share=share)


def magnitudes_of(
    spec: Spec, case: Case, inputs: Inputs, upstream: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return result name -> sums of the terms' magnitudes, larger where rounded intermediate values count.

    Half of what ``ROUNDING`` makes of it is in the fence; a value v rounded to ``dtype`` has an error of standard
    deviation ``eps / sqrt(12) 2^floor(log2(abs(v)))``.
    """
    magnitudes = dict(spec.magnitudes(case, inputs, upstream))
    if spec.deviations is not None:
        scale = 2 * DEVIATIONS * torch.finfo(dtype).eps / math.sqrt(12) / ROUNDING
        for name, deviation in spec.deviations(case, inputs, upstream).items():
            magnitudes[name] = magnitudes[name] + scale * deviation
    return magnitudes


def fence_of(tolerance: Tolerance, gold: torch.Tensor, slack: torch.Tensor) -> torch.Tensor:
    """Return the allowed distance of a result from the gold; ``slack`` is an ulp plus the allowed rounding.

    A row of the contract is absolute, but rounding of unusually large terms can exceed it.
    """
    return tolerance.atol + tolerance.rtol * gold.abs() + slack / 2


def parity(candidate: torch.Tensor, other: torch.Tensor, tolerance: Tolerance) -> Comparison:
    """Check that the results of two backends differ by at most ``|a - b| <= atol + rtol |b|``."""
    wrong = described(candidate, other)
    if wrong:
        return Comparison(False, message=wrong)
    if not other.numel():
        return Comparison(False, message="an empty result proves nothing")
    value, expected = candidate.double(), other.double()
    special = ~expected.isfinite()
    if not _same_special(value, expected, special):
        return Comparison(False, message="NaN or inf in one but not the other")
    error = torch.where(special, 0.0, value - expected).abs()
    size = torch.where(special, 0.0, expected).abs()
    relative = torch.where(size == 0, 0.0, error / size)
    numbers = float(error.max()), float(error.mean()), float(relative.max())
    worst = _at(error == error.max(), candidate, other)
    if (error > tolerance.atol + tolerance.rtol * size).any():
        return Comparison(False, *numbers, f"outside the contract's fence: {worst}", worst)
    return Comparison(True, *numbers, worst=worst)


def _same_special(value: torch.Tensor, gold: torch.Tensor, special: torch.Tensor) -> bool:
    same = torch.where(gold.isnan(), value.isnan(), value == gold)
    return bool(torch.where(special, same, value.isfinite()).all())


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the spacing of ``dtype`` at each FP64 value."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value).exponent - 1
    spacing = torch.ldexp(torch.ones_like(value), exponent) * info.eps
    return torch.where(value == 0, 0.0, spacing).clamp(min=info.tiny * info.eps)


def bits(candidate: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Require equal bits in the integer view: +0 and -0 differ, NaNs with equal bits are equal."""
    wrong = described(candidate, expected)
    if wrong:
        return Comparison(False, message=wrong)
    if not expected.numel():
        return Comparison(True, 0.0, 0.0, 0.0)
    left, right = (bits_of(value) if value.is_floating_point() else value for value in (candidate, expected))
    if torch.equal(left, right):
        return Comparison(True, 0.0, 0.0, 0.0)
    differ = left != right
    error = (candidate.double() - expected.double()).abs()
    relative = (error / expected.double().abs()).nan_to_num(0.0, 0.0)
    first = int(differ.flatten().nonzero()[0])
    distance = abs(int(left.flatten()[first]) - int(right.flatten()[first]))
    worst = f"{_at(differ, candidate, expected)}, {distance} ULP"
    numbers = float(error.nan_to_num().max()), float(error.nan_to_num().mean()), float(relative.max())
    message = f"{int(differ.sum())} of {differ.numel()} elements differ in bits; first: {worst}"
    return Comparison(False, *numbers, message, worst)


def _at(mask: torch.Tensor, candidate: torch.Tensor, expected: torch.Tensor) -> str:
    """Return the index and both values of the first element where ``mask`` is True."""
    index = tuple(int(i) for i in mask.nonzero()[0])
    return f"at {list(index)} got {float(candidate[index]):.9g}, expected {float(expected[index]):.9g}"
