"""The definition of causal_conv1d against values worked out by hand, and against PyTorch's convolution."""

import pytest
import torch
import torch.nn.functional as F

from rl_kernels.gated_delta.conv_reference import causal_conv1d

pytestmark = pytest.mark.smoke
X = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)[None, :, None]
WEIGHT = torch.tensor([[1000.0, 100.0, 10.0, 1.0]], dtype=torch.float64)


def test_by_hand():
    found = causal_conv1d(X, WEIGHT, activation=None, return_state=True)
    assert found.out.flatten().tolist() == [1, 12, 123, 1234, 2345]
    assert found.state.flatten().tolist() == [3, 4, 5]
    state, bias = torch.tensor([7.0, 8.0, 9.0], dtype=torch.float64)[None, :, None], torch.ones(1, dtype=torch.float64)
    found = causal_conv1d(X, WEIGHT, bias, activation=None, state=state)
    assert found.flatten().tolist() == [7892, 8913, 9124, 1235, 2346]


def test_sequences_do_not_see_each_other():
    packed = causal_conv1d(X, WEIGHT, activation=None, cu_seqlens=torch.tensor([0, 2, 2, 5]), return_state=True)
    assert packed.out.flatten().tolist() == [1, 12, 3, 34, 345]
    assert packed.state.flatten().tolist() == [0, 1, 2, 0, 0, 0, 3, 4, 5]
    padded = causal_conv1d(X, WEIGHT, activation=None, start=torch.tensor([3]), return_state=True)
    assert padded.out.flatten().tolist() == [0, 0, 0, 4, 45]
    assert padded.state.flatten().tolist() == [0, 4, 5]


def test_values_are_those_of_the_model_s_convolution():
    x, weight, bias = torch.randn(2, 9, 6), torch.randn(6, 4), torch.randn(6)
    rows = F.conv1d(x.mT, weight[:, None], bias, padding=3, groups=6)[..., :9].mT
    torch.testing.assert_close(causal_conv1d(x, weight, bias), F.silu(rows))
