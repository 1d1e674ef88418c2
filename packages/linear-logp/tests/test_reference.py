"""The definition against other definitions: cross entropy and the entropy of a categorical distribution, in FP64."""

import pytest
import torch
import torch.nn.functional as F

from rl_kernels.core.testing import Draw
from rl_kernels.linear_logp.reference import linear_logp


def _call(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    draw = Draw(dtype, seed=5)
    return draw.normal(3, 4, 8), draw.normal(11, 8, scale=8**-0.5), draw.ids(11, 3, 4), draw.normal(11)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.smoke
def test_equals_cross_entropy_and_categorical(with_bias: bool, temperature: float) -> None:
    hidden, weight, ids, bias = _call()
    offset = bias if with_bias else None
    stats = linear_logp(hidden, weight, ids, offset, temperature=temperature, return_stats=True)
    logits = F.linear(hidden, weight, offset) / temperature
    torch.testing.assert_close(stats.logp, -F.cross_entropy(logits.movedim(-1, 1), ids, reduction="none"))
    torch.testing.assert_close(stats.logsumexp, logits.exp().sum(-1).log())
    torch.testing.assert_close(stats.entropy, torch.distributions.Categorical(logits=logits).entropy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_not_rounded_to_the_dtype_of_the_inputs(dtype: torch.dtype) -> None:
    hidden, weight, ids, bias = _call(dtype)
    logp = linear_logp(hidden, weight, ids, bias)
    assert logp.dtype == torch.float32
    exact = linear_logp(hidden.double(), weight.double(), ids, bias.double())
    torch.testing.assert_close(logp.double(), exact, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_of_logits_is_rounded_before_the_products(dtype: torch.dtype) -> None:
    hidden, weight, ids, bias = _call(dtype)
    leaves = weight.requires_grad_(), bias.float().requires_grad_()
    logp = linear_logp(hidden, leaves[0], ids, leaves[1])
    dweight, dbias = torch.autograd.grad(logp.sum(), leaves)

    rows = hidden.float().flatten(0, 1)
    z = rows @ weight.detach().float().T + bias.float()
    dz = F.one_hot(ids.flatten(), len(weight)) - z.softmax(-1)
    exact, rounded = dz.T @ rows, dz.to(dtype).float().T @ rows
    torch.testing.assert_close(dweight, rounded.to(dtype), atol=0, rtol=torch.finfo(dtype).eps)
    assert (dweight.float() - rounded).norm() < (dweight.float() - exact).norm()
    torch.testing.assert_close(dbias, dz.sum(0))
