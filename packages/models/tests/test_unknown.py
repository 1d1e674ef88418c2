"""Modules that `invariant` cannot vouch for are left alone and told, or raise; and norms that it recognizes."""

import re

import pytest
import torch
from torch import nn

from rl_kernels.det_gemm import DetLinear
from rl_kernels.models import invariant, layers


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


class Activates(Multiplies):
    """Another, whose activation is a function."""

    def forward(self, x):
        return nn.functional.silu(self.inner(x))


class Raises(Multiplies):
    """Another, with a function of PyTorch that has no module."""

    def forward(self, x):
        return torch.exp2(self.inner(x))


class Holds(Multiplies):
    """Another, whose activation is a module."""

    def __init__(self):
        super().__init__()
        self.gelu = nn.GELU()

    def forward(self, x):
        return self.gelu(self.inner(x))


class QuantLinear(nn.Module):
    """A linear layer with packed weights, as quantization libraries have them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("packed", torch.zeros(24, 3, dtype=torch.int32))

    def forward(self, x):
        return x


class Experts(nn.Module):
    """Each row goes through the expert of its largest element: the rows of an expert are multiplied together."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 24, 24))

    def forward(self, x):
        chosen, out = x.argmax(-1) % 2, torch.empty_like(x)
        for expert in range(2):
            out[chosen == expert] = x[chosen == expert] @ self.weight[expert]
        return out


class GatedRMSNorm(nn.Module):
    """Without its gate it computes what an RMSNorm of Llama does."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x, gate=None):
        wide = x.float() if gate is None else x.float() * nn.functional.silu(gate)
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)


class Odd(nn.Linear):
    pass


def patched():
    made = nn.Linear(4, 4)
    made.forward = lambda input: input
    return made


def parametrized():
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))


COMPUTES = "its forward calls {}; use det_attention"
LEFT = {
    "a subclass": (lambda: Odd(4, 4), "Odd is a subclass"),
    "a parametrization": (parametrized, "ParametrizedLinear is a subclass"),
    "FP64": (lambda: nn.Linear(4, 4, dtype=torch.float64), "its weight is torch.float64"),
    "a forward of its own": (patched, "its forward was replaced"),
    "several dims": (lambda: nn.LayerNorm((2, 3)), "several dims"),
    "attention of torch": (lambda: nn.MultiheadAttention(8, 2), "computes its products itself"),
    "a norm over the batch": (lambda: nn.BatchNorm1d(4), "BatchNorm1d is PyTorch's"),
    "a norm over groups": (lambda: nn.GroupNorm(2, 4), "GroupNorm is PyTorch's"),
    "a norm with a gate": (GatedRMSNorm, "GatedRMSNorm is an unknown kind of norm"),
    "an activation with settings": (lambda: nn.ELU(2.0), "ELU with other settings"),
    "matrices": (Experts, "Experts has matrices of its own"),
    "attention": (Attends, COMPUTES.format("scaled_dot_product_attention")),
    "a product": (Multiplies, COMPUTES.format("@")),
    "a function": (Activates, COMPUTES.format("silu")),
    "a power": (Raises, COMPUTES.format("exp2")),
    "packed weights": (QuantLinear, "QuantLinear is not an nn.Linear; it may be quantized"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("what", LEFT)
def test_what_it_does_not_know_is_left_alone_and_told(what):
    make, why = LEFT[what]
    made = nn.Sequential(nn.Linear(2, 2), make())
    before = [type(module) for module in made.modules()]
    told = rf"^model: left alone, and may depend on the batch: 1[. (].*{re.escape(why)}"
    with pytest.warns(UserWarning, match=told):
        handle = invariant(made)
    assert [name for name in handle.left if "." not in name] == ["1"]
    assert why in handle.left["1"]
    assert type(made[1]) is before[2]
    assert isinstance(made[0], DetLinear)
    handle.undo()
    with pytest.raises(ValueError, match=told):
        invariant(made, strict=True)
    assert [type(module) for module in made.modules()] == before


def test_a_warning_names_a_few():
    made = nn.Sequential(*(Odd(2, 2) for _ in range(7)))
    with pytest.warns(UserWarning, match="and 4 more"):
        invariant(made).undo()


def test_what_it_knows_passes():
    made = nn.Sequential(nn.Embedding(5, 24), Adds(), Holds(), nn.Linear(24, 3))
    invariant(made, strict=True).undo()


@pytest.mark.filterwarnings("ignore")
def test_strict_refuses_a_dynamically_quantized_model():
    if not torch.backends.quantized.supported_engines or "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("needs PyTorch's quantized kernels")
    made = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 8)), {nn.Linear})
    with pytest.raises(ValueError, match="may be quantized"):
        invariant(made, strict=True)


@pytest.mark.smoke
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
        assert layers._recognized(SomeNorm(compute), "eps") == form
    assert layers._recognized(SomeNorm(lambda self, x, dtype: x.to(dtype)), "eps") is None
    assert layers._recognized(SomeNorm(lambda self, x, dtype: x.no_such_thing), "eps") is None
