"""Comparisons: two rules of accuracy, bits, spacing."""

import math
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.core.contract import Tolerance
from rl_kernels.core.testing import bits_of
from rl_kernels.lab.check import compare

FENCE = Tolerance(1e-2, 0.0, False, "test")
GOLD = torch.tensor([1.0, -2.0, 3.0, 1e-6], dtype=torch.float64)
MAGNITUDE = torch.zeros_like(GOLD)


def held(candidate, eager=None, gold=GOLD, magnitude=MAGNITUDE, fence=FENCE, direction="forward"):
    return compare.accuracy(candidate, gold.float() if eager is None else eager, gold, magnitude, fence, direction)


def test_what_is_rounded_past_the_largest_number_is_infinite():
    gold = torch.tensor([65519.0, -65521.0], dtype=torch.float64)
    right = torch.tensor([65504.0, -torch.inf], dtype=torch.float16)
    fence = Tolerance(0.0, 1e-3, False, "test")
    assert held(right, eager=right, gold=gold, magnitude=gold.abs(), fence=fence).passed
    saturated = torch.tensor([65504.0, -65504.0], dtype=torch.float16)
    assert "inf in one" in held(saturated, eager=right, gold=gold, magnitude=gold.abs(), fence=fence).message


@pytest.mark.smoke
def test_beyond_the_fence():
    found = held(GOLD.float())
    assert found.passed
    assert found.max_abs < 1e-6
    found = held(GOLD.float() + torch.tensor([0, 0.1, 0, 0]))
    assert not found.passed
    assert "fence" in found.message
    assert "[1]" in found.message
    assert found.max_abs == pytest.approx(0.1, rel=1e-5)
    # Inside the fence but worse than eager.
    found = held(GOLD.float() + 1e-3)
    assert not found.passed
    assert "eager" in found.message


def test_share_is_what_a_result_needs_of_the_fence():
    eager = GOLD.float() + 5e-3
    moved = held(GOLD.float() + torch.tensor([0, 5e-3, 0, 0]), eager=eager)
    assert moved.share == pytest.approx(0.5, rel=1e-3)
    # What rounding alone may do needs nothing of it, nor does what plain PyTorch does in a generated case.
    assert held(GOLD.float(), magnitude=GOLD.abs()).share == 0
    known = (GOLD.float() + 5e-3, eager, GOLD, MAGNITUDE, FENCE, "forward")
    assert compare.accuracy(*known, calibrated=False).share == 0
    # By another row than the one that applies.
    assert compare.accuracy(*known, row=FENCE._replace(atol=1e-1)).share == pytest.approx(0.05, rel=1e-3)


def test_eager_error_sets_the_scale():
    assert held(GOLD.float() + 1e-3, eager=GOLD.float() + 6e-4).passed
    assert not held(GOLD.float() + 1e-3, eager=GOLD.float() + 4e-4).passed
    assert held(GOLD.float() + 1e-3, eager=GOLD.float() + 4e-4, direction="gradient").passed


def test_magnitudes_of_the_terms_set_the_scale():
    moved = GOLD.float() + 1e-4
    assert not held(moved).passed
    assert held(moved, magnitude=torch.full_like(GOLD, 1e-4 / compare.ROUNDING)).passed


def test_a_tiny_gradient_of_zeros_is_no_gradient():
    gold = torch.full((8,), 1e-6, dtype=torch.float64)
    assert not held(torch.zeros(8), gold=gold, magnitude=torch.zeros(8).double(), direction="gradient").passed


def test_l2_catches_what_no_single_element_shows():
    eager = GOLD.float().clone()
    eager[0] += 1e-3
    assert held(eager, eager=eager).passed
    found = held(GOLD.float() + 1.9e-3, eager=eager)
    assert not found.passed
    assert "L2" in found.message


def test_special_values_must_stand_where_the_gold_has_them():
    for special in (math.nan, math.inf, -math.inf):
        gold = GOLD.clone()
        gold[2] = special
        assert held(gold.float(), gold=gold).passed
        assert not held(GOLD.float(), gold=gold).passed
        assert not held(gold.float(), gold=GOLD).passed


def test_a_wrong_form_or_an_empty_result():
    for candidate, what in ((GOLD.float()[:3], "shape"), (GOLD.half(), "dtype"), (None, "a tensor")):
        for found in (held(candidate), compare.bits(candidate, GOLD.float())):
            assert f"expected {what}" in found.message
    empty = torch.zeros(0)
    assert "proves nothing" in compare.accuracy(empty, empty, empty.double(), empty.double(), FENCE, "forward").message
    assert "proves nothing" in compare.parity(empty, empty, FENCE).message
    assert compare.bits(empty, empty).passed


def test_ulp_is_the_distance_to_the_next_number():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = torch.tensor([1.0, 1.5, 2.0, 3.0, -5.0, 0.1], dtype=dtype)
        following = (bits_of(rounded.abs()) + 1).view(dtype)
        assert torch.equal(compare.ulp(rounded.double(), dtype), following.double() - rounded.abs().double())
        assert float(compare.ulp(torch.zeros((), dtype=torch.float64), dtype)) > 0


def test_bits_see_the_sign_of_zero_and_the_same_nan():
    assert not compare.bits(torch.tensor([-0.0]), torch.tensor([0.0])).passed
    assert compare.bits(torch.tensor([math.nan]), torch.tensor([math.nan])).passed
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert not compare.bits(other_nan, torch.tensor([math.nan])).passed


def test_bits_report_the_first_element_and_its_distance():
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    candidate = expected.clone()
    candidate[1, 0] = torch.nextafter(candidate[1, 0], torch.tensor(9.0))
    found = compare.bits(candidate, expected)
    assert "1 of 4" in found.message
    assert "[1, 0]" in found.message
    assert "1 ULP" in found.message


def test_rounded_steps_widen_the_fence_by_six_deviations():
    deviations = {"out": torch.tensor([0.0, 1.0], dtype=torch.float64)}
    zeros = {name: torch.zeros(2, dtype=torch.float64) for name in ("out", "other")}
    spec = SimpleNamespace(magnitudes=lambda *_: zeros, deviations=lambda *_: deviations)
    found = compare.magnitudes_of(spec, None, {}, {}, torch.bfloat16)
    assert not found["other"].any()
    exact = torch.zeros(2, dtype=torch.float64)
    fence = compare.fence_of(FENCE, exact, compare.ROUNDING * found["out"])
    assert fence.tolist() == pytest.approx([1e-2, 1e-2 + 6 * 2.0**-8 / math.sqrt(3)])
