"""The fused tree sum of partials has the bits of the tree of plain additions."""

import pytest
import torch

from rl_kernels.core.distributed import tree_sum
from rl_kernels.core.testing import bits_of
from rl_kernels.core.triton_lib.launch import INSTALLED, INTERPRETED

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not (INSTALLED and INTERPRETED), reason="needs the interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_fused_sum(device, count):
    from rl_kernels.core.triton_lib.sums import tree_total

    generator = torch.Generator().manual_seed(count)
    for shape in ((7,), (33, 65), (2, 3, 1024)):
        scale = 10.0 ** torch.randint(-3, 4, (count, *shape), generator=generator)
        parts = (torch.randn(count, *shape, generator=generator) * scale).to(device)
        bias = torch.randn(shape[-1], generator=generator).to(device)
        assert bits_of(tree_total(parts, None, torch.float32)).equal(bits_of(tree_sum(parts)))
        assert bits_of(tree_total(parts, bias, torch.float32)).equal(bits_of(tree_sum(parts) + bias))
        if device == "cuda":
            found = tree_total(parts, bias.bfloat16(), torch.bfloat16)
            assert bits_of(found).equal(bits_of((tree_sum(parts) + bias.bfloat16().float()).bfloat16()))


@pytest.mark.skipif(not INSTALLED, reason="Triton is not installed")
def test_other_sums_are_left_to_torch():
    from rl_kernels.core.triton_lib.sums import tree_total

    assert tree_total(torch.ones(3, 4), None, torch.float32) is None
    assert tree_total(torch.ones(2, 4).bfloat16(), None, torch.float32) is None
    assert tree_total(torch.ones(4, 2).t(), None, torch.float32) is None
