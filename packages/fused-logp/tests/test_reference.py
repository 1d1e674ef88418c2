"""The definition of fused_logp against closed forms and against PyTorch's own functions."""

import math

import pytest
import torch

from rl_kernels.fused_logp import reference

DOUBLE = torch.float64
pytestmark = pytest.mark.smoke


def test_uniform_logits():
    logits = torch.full((2, 8), 3.0, dtype=DOUBLE)
    logp, lse, entropy = reference.fused_logp(logits, torch.tensor([0, 7]), return_stats=True)
    assert logp.tolist() == pytest.approx([-math.log(8)] * 2)
    assert lse.tolist() == pytest.approx([3 + math.log(8)] * 2)
    assert entropy.tolist() == pytest.approx([math.log(8)] * 2)


def test_two_entries_by_hand():
    logits = torch.tensor([0.0, math.log(3.0)], dtype=DOUBLE)
    logp, lse, entropy = reference.fused_logp(logits, torch.tensor(1), return_stats=True)
    assert float(logp) == pytest.approx(math.log(0.75))
    assert float(lse) == pytest.approx(math.log(4.0))
    assert float(entropy) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_equals_negated_cross_entropy():
    torch.manual_seed(0)
    logits, ids = torch.randn(5, 11, dtype=DOUBLE), torch.randint(0, 11, (5,))
    expected = -torch.nn.functional.cross_entropy(logits / 0.7, ids, reduction="none")
    torch.testing.assert_close(reference.fused_logp(logits, ids, temperature=0.7), expected)
