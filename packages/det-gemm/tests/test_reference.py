"""The definition beside sums that are written out."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_kernels.core.constants import STEP
from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import reference
from rl_kernels.det_gemm.spec.cases import CUT_OFF, _product_magnitudes, partial_sums

pytestmark = pytest.mark.smoke
DRAW = Draw(torch.float64, seed=3)
A, B, DC, BIAS = DRAW.normal(5, 7), DRAW.normal(7, 4), DRAW.normal(5, 4), DRAW.normal(4)


def written_out(a, b):
    """Return ``a @ b`` for FP64 matrices, every element a correctly rounded sum."""
    rows, columns = a.tolist(), b.t().tolist()
    sums = [[math.fsum(x * y for x, y in zip(row, column, strict=True)) for column in columns] for row in rows]
    return torch.tensor(sums, dtype=torch.float64)


def test_weight_gradient_matches_autograd():
    b = B.clone().requires_grad_()
    (expected,) = torch.autograd.grad(reference.det_gemm(A, b), b, DC)
    torch.testing.assert_close(reference.det_gemm_dw(A, DC), expected)
    buffer = torch.full((7, 4), 3.0, dtype=torch.float64)
    torch.testing.assert_close(reference.det_gemm_dw(A, DC, accumulate_into=buffer), written_out(A.t(), DC) + 3)
    assert bool((buffer == 3).all())


@pytest.mark.parametrize("terms", [0, 5, 3 * STEP + 1, 6 * STEP])
def test_partial_sums(terms):
    """As many rows at a time as fit into ``piece``, and as many steps of all; the last time fewer."""
    draw = Draw(torch.float64, seed=5)
    a, b = draw.normal(3, terms), draw.normal(terms, 2)
    for start in (torch.zeros((), dtype=torch.float64), draw.normal(3, 2)):
        ends = range(STEP, terms + STEP, STEP)
        expected = sum(((start + written_out(a[:, :end], b[:end])).abs() for end in ends), start.new_zeros(3, 2))
        for piece in (1, 4, 12, 24, 1 << 20):
            torch.testing.assert_close(partial_sums(a, b, start, piece), expected)


class Largest(TorchDispatchMode):
    """Keeps the size of the largest result of ``cumsum``."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.cumsum.default:
            self.numel = max(self.numel, made.numel())
        return made


def test_partial_sums_are_computed_in_pieces():
    a, b = torch.ones(6, 10 * STEP), torch.ones(10 * STEP, 4)
    for piece, most in ((1, 4), (8, 8), (24, 24), (50, 48), (1 << 20, 240)):
        with Largest() as largest:
            partial_sums(a, b, torch.zeros(()), piece)
        assert largest.numel == most


def test_budget_on_a_gpu_includes_truncation(monkeypatch):
    draw = Draw(torch.float64, seed=6)
    a, b, start = draw.normal(3, 40), draw.normal(40, 2), draw.normal(3, 2)
    terms = start.abs() + a.abs() @ b.abs()
    torch.testing.assert_close(_product_magnitudes(a, b, start), terms)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    torch.testing.assert_close(_product_magnitudes(a, b, start), terms + partial_sums(a, b, start) * CUT_OFF)
    rows = _product_magnitudes(a.view(3, 1, 40), b)
    torch.testing.assert_close(rows[:, 0], a.abs() @ b.abs() + partial_sums(a, b, torch.zeros(())) * CUT_OFF)
