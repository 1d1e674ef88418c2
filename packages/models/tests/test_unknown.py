"""Modules that `invariant` cannot vouch for are told, and raise with `strict`."""

import pytest
import torch
from torch import nn

from rl_kernels.models import invariant


class Attends(nn.Module):
    """A block of a user's own, which calls PyTorch's attention in its forward."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(24, 72)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Multiplies(nn.Module):
    """Another, which multiplies by a weight that is not its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(24, 24)

    def forward(self, x):
        return self.inner(x) @ self.inner.weight


class Adds(Multiplies):
    """Another, which adds alone."""

    def forward(self, x):
        return x + self.inner(x).relu()


class QuantLinear(nn.Module):
    """A linear layer with packed weights, as quantization libraries have them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("packed", torch.zeros(24, 3, dtype=torch.int32))

    def forward(self, x):
        return x


class Activates(Multiplies):
    """Another, whose activation is a function."""

    def forward(self, x):
        return nn.functional.silu(self.inner(x))


@pytest.mark.parametrize(
    ("block", "called"), [(Attends, "scaled_dot_product_attention"), (Multiplies, "@"), (Activates, "silu")]
)
def test_a_forward_that_computes_by_itself_is_left_and_told(block, called):
    made = nn.Sequential(nn.Linear(24, 24), block())
    told = rf"1 \(its forward calls {called}; use det_attention"
    with pytest.raises(ValueError, match=told):
        invariant(made, strict=True)
    assert type(made[0]) is nn.Linear
    with pytest.warns(UserWarning, match=told):
        handle = invariant(made)
    assert list(handle.left) == ["1"]
    handle.undo()
    invariant(nn.Sequential(Adds()), strict=True).undo()


def test_a_linear_layer_that_is_not_one_of_pytorch_s_is_left_and_told():
    made = nn.Sequential(nn.Linear(24, 24), QuantLinear())
    told = r"1 \(QuantLinear is not an nn.Linear; it may be quantized\)"
    with pytest.raises(ValueError, match=told):
        invariant(made, strict=True)
    with pytest.warns(UserWarning, match=told):
        handle = invariant(made)
    assert list(handle.left) == ["1"]
    handle.undo()


@pytest.mark.filterwarnings("ignore")
def test_strict_refuses_a_dynamically_quantized_model():
    if not torch.backends.quantized.supported_engines or "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("needs PyTorch's quantized kernels")
    made = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 8)), {nn.Linear})
    with pytest.raises(ValueError, match="may be quantized"):
        invariant(made, strict=True)
