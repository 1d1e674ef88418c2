"""The definition of gated_delta_rule against values computed by hand."""

import torch

from rl_kernels.gated_delta import reference


def test_by_hand():
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([10.0, -4.0])
    assert reference.gated_delta_rule(x, y, scale=0.5).tolist() == [6.0, 0.0]
