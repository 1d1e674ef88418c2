"""The definition of det_attention against values by hand, PyTorch's own attention and numerical gradients."""

import pytest
import torch
import torch.nn.functional as F

from rl_kernels.attention import reference

pytestmark = pytest.mark.smoke


def operands(queries=5, keys=7, heads=4, kv_heads=2, head=8, seed=3):
    source = torch.Generator().manual_seed(seed)
    shapes = ((2, queries, heads, head), (2, keys, kv_heads, head), (2, keys, kv_heads, head))
    return tuple(torch.randn(shape, generator=source, dtype=torch.float64, requires_grad=True) for shape in shapes)


def test_by_hand():
    q = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).double()
    k = torch.tensor([0.0, 2.0]).view(1, 2, 1, 1).double()
    v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1).double()
    out, lse = reference.det_attention(q, k, v, causal=True, return_lse=True)
    share = torch.tensor(2.0).double().exp() / (1 + torch.tensor(2.0).double().exp())
    assert torch.allclose(out.flatten(), torch.stack((torch.tensor(4.0).double(), 4 + 4 * share)))
    assert torch.allclose(lse.flatten(), torch.stack((torch.tensor(0.0).double(), -(1 - share).log())))


@pytest.mark.parametrize("causal", [True, False])
def test_values_and_gradients_of_pytorch(causal):
    q, k, v = operands(5, 5)
    found = reference.det_attention(q, k, v, causal=causal)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(found, expected)
    upstream = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad(found, (q, k, v), upstream), torch.autograd.grad(expected, (q, k, v), upstream), strict=True
    ):
        assert torch.allclose(mine, theirs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "window": (2, 1)},
        {"softcap": 1.5, "scale": 0.7},
        {"sinks": True},
        {"k_start": torch.tensor([0, 3])},
        {"seqused_q": torch.tensor([2, 5])},
    ],
    ids=str,
)
def test_gradients_are_those_of_the_values(options):
    q, k, v = operands()
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    given = {"causal": True, **options, **({"sinks": sinks} if "sinks" in options else {})}
    leaves = (q, k, v, *([sinks] if "sinks" in options else []))

    def call(q, k, v, sinks=None):
        return reference.det_attention(q, k, v, **{**given, **({} if sinks is None else {"sinks": sinks})})

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_pages_are_the_keys_in_order():
    q, k, v = (x.detach() for x in operands(3, 32))
    pages = torch.cat((k[1].unflatten(0, (2, 16)), k[0].unflatten(0, (2, 16))))
    values = torch.cat((v[1].unflatten(0, (2, 16)), v[0].unflatten(0, (2, 16))))
    table, used = torch.tensor([[2, 3], [0, 1]]), torch.tensor([32, 20])
    found = reference.det_attention(q, pages, values, causal=True, block_table=table, seqused_k=used)
    for b in range(2):
        alone = reference.det_attention(q[b : b + 1], k[b : b + 1, : used[b]], v[b : b + 1, : used[b]], causal=True)
        assert torch.equal(found[b : b + 1], alone)
