"""The modules: PyTorch's results and parameters, and the bits of the functions."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from rl_kernels.norm import LayerNorm, RMSNorm, layer_norm, rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "theirs", [nn.RMSNorm(48), nn.RMSNorm(48, 1e-3), nn.LayerNorm(48), nn.LayerNorm(48, 1e-2, bias=False)]
)
def test_a_module_is_pytorch_s(theirs: nn.RMSNorm | nn.LayerNorm, dtype: torch.dtype) -> None:
    made = RMSNorm if isinstance(theirs, nn.RMSNorm) else LayerNorm
    options = {} if made is RMSNorm else {"bias": theirs.bias is not None}
    theirs = theirs.to(dtype)
    for value in theirs.parameters():
        nn.init.normal_(value)
    ours = made(48, theirs.eps, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    # The third row is small enough for eps to count.
    x = torch.randn(3, 48, dtype=dtype) * torch.tensor([1, 30, 1e-3], dtype=dtype)[:, None]
    torch.testing.assert_close(ours(x), theirs(x))
    assert torch.equal(ours(x)[1], ours(x[1:2])[0])


def test_options_of_the_functions_reach_them() -> None:
    x, norm = torch.randn(5, 16).bfloat16(), RMSNorm(16, 1e-6, offset=1.0, cast_first=True)
    nn.init.normal_(norm.weight)
    assert torch.equal(norm(x), rms_norm(x, norm.weight, eps=1e-6, offset=1.0))
    assert "offset=1.0, cast_first=True" in repr(norm)
    plain = LayerNorm(16, elementwise_affine=False)
    assert torch.equal(plain(x), layer_norm(x))


@pytest.mark.parametrize("made", [RMSNorm, LayerNorm])
def test_several_dims_are_refused(made: type[nn.Module]) -> None:
    assert made([16]).normalized_shape == (16,)
    for shape in ((3, 16), 2.0, True):
        with pytest.raises(TypeError, match="normalized_shape"):
            made(shape)


def test_defaults_are_pytorch_s() -> None:
    for ours, theirs in ((RMSNorm, nn.RMSNorm), (LayerNorm, nn.LayerNorm)):
        for parameter in inspect.signature(theirs).parameters.values():
            assert inspect.signature(ours).parameters[parameter.name].default == parameter.default
