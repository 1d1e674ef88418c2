"""The norms of invariant(): what they compute, and how a norm of transformers is recognised."""

import pytest
import torch
from torch import nn

from rl_kernels.core.testing import Draw
from rl_kernels.models import layers


@pytest.mark.parametrize("form", layers.FORMS, ids=str)
def test_rows_follow_neither_batch_nor_layout_nor_threads(form, torch_threads):
    """A long row alone is where a library's mean takes other threads, and a matrix stored by columns another order."""
    x = Draw(torch.float32, seed=10).normal(5, 40_000)
    whole = layers.norm(x, None, None, 1e-5, form)
    for threads in (1, 2):
        with torch_threads(threads):
            assert torch.equal(layers.norm(x[3:4], None, None, 1e-5, form)[0], whole[3])
            assert torch.equal(layers.norm(x.t().contiguous().t(), None, None, 1e-5, form), whole)


def test_a_form_is_known_by_what_it_computes():
    """Whatever a norm is called, and whatever its weight is now."""

    class SomeNorm(nn.Module):
        def __init__(self, compute):
            super().__init__()
            self.weight, self.eps, self.compute = nn.Parameter(torch.ones(48)), 1e-3, compute

        def forward(self, x):
            return self.compute(self, x.float(), x.dtype)

    def scaled(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    computes = [
        lambda self, x, dtype: self.weight * scaled(self, x).to(dtype),
        lambda self, x, dtype: (self.weight * scaled(self, x)).to(dtype),
        lambda self, x, dtype: ((1 + self.weight.float()) * scaled(self, x)).to(dtype),
        lambda self, x, dtype: (self.weight * scaled(self, x - x.mean(-1, keepdim=True))).to(dtype),
    ]
    for form, compute in zip(layers.FORMS, computes, strict=True):
        assert layers._recognised(SomeNorm(compute), "eps") == form
    assert layers._recognised(SomeNorm(lambda self, x, dtype: x.to(dtype)), "eps") is None
    assert layers._recognised(SomeNorm(lambda self, x, dtype: x.no_such_thing), "eps") is None
