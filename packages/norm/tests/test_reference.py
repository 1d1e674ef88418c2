"""The definitions of rms_norm and layer_norm against values worked out by hand, and against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from rl_kernels.core.testing import Draw
from rl_kernels.norm import reference

pytestmark = pytest.mark.smoke
X = torch.tensor([[3.0, 4.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)


def test_rms_norm_by_hand():
    """The squares of the first row have a mean of 25 / 4, its root is 2.5."""
    found = reference.rms_norm(X, WEIGHT, eps=0.0)
    torch.testing.assert_close(found, torch.tensor([[1.2, 3.2, 0, 0], [1, 2, 3, 4]], dtype=torch.float64))
    found = reference.rms_norm(X, WEIGHT, eps=0.0, offset=1.0, cast_first=False)
    torch.testing.assert_close(found[1], WEIGHT + 1)


def test_layer_norm_by_hand():
    """1 and 3 are 1 below and 1 above their mean, and so is their standard deviation."""
    x = torch.tensor([[1.0, 3.0]])
    assert reference.layer_norm(x, eps=0.0).tolist() == [[-1.0, 1.0]]
    weight, bias = torch.tensor([2.0, 3.0]), torch.tensor([0.5, -0.5])
    assert reference.layer_norm(x, weight, bias, eps=0.0).tolist() == [[-1.5, 2.5]]


def test_rounding_and_dtype_are_those_of_llamas_module():
    for dtype in (torch.bfloat16, torch.float16):
        draw = Draw(dtype)
        x, weight = draw.normal(4, 64), draw.uniform(0.5, 1.5, 64)
        row = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        assert torch.equal(reference.rms_norm(x, weight), weight * row.to(dtype))
        assert torch.equal(reference.rms_norm(x, weight.float()), weight.float() * row.to(dtype))
        after = reference.rms_norm(x, weight.float(), cast_first=False)
        assert torch.equal(after, (weight.float() * row).to(dtype))
        assert not torch.equal(reference.rms_norm(x, weight), after)
        assert reference.rms_norm(x).dtype == reference.layer_norm(x, weight.float()).dtype == dtype


def test_gated_rounding_is_that_of_qwen3_next():
    for dtype, weight_dtype in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        draw = Draw(dtype)
        x, gate, weight = draw.normal(4, 64), draw.normal(4, 64), draw.uniform(0.5, 1.5, 64).to(weight_dtype)
        row = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        theirs = ((weight * row.to(dtype)) * F.silu(gate.float())).to(dtype)
        assert torch.equal(reference.rms_norm(x, weight, gate=gate), theirs)
        once = reference.rms_norm(x, weight, gate=gate, cast_first=False)
        assert torch.equal(once, (weight.float() * row * F.silu(gate.float())).to(dtype))
        assert not torch.equal(once, theirs)


@pytest.mark.parametrize("residual", [None, X.flip(0)])
def test_values_are_those_of_pytorch(residual):
    total, bias = X if residual is None else X + residual, WEIGHT.flip(0)
    for found, expected in (
        (reference.rms_norm(X, WEIGHT, residual=residual), F.rms_norm(total, (4,), WEIGHT, 1e-6)),
        (reference.layer_norm(X, WEIGHT, bias, residual=residual), F.layer_norm(total, (4,), WEIGHT, bias, 1e-5)),
    ):
        torch.testing.assert_close(found if residual is None else found.output, expected)
        assert residual is None or torch.equal(found.sum, total)
