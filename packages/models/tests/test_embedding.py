"""The gradient of an embedding under ``invariant``: an order of its own, the same in every run and with any padding."""

import copy

import pytest
import torch
from torch import nn

from rl_kernels.core.triton_lib.launch import INTERPRETED
from rl_kernels.models import invariant
from rl_kernels.models.fused.embedding import OrderedEmbedding, embedding

WIDTH = 520
"""More than a program takes."""


class Scaled(nn.Embedding):
    """As Gemma has it."""

    def forward(self, input):
        return super().forward(input) * 3.0


def drawn(device, dtype, ids=11, places=(3, 40), width=WIDTH):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ids, width, generator=generator).to(device, dtype).requires_grad_()
    chosen = torch.randint(ids - 1, places, generator=generator).to(device)
    return weight, chosen, torch.randn(*places, width, generator=generator).to(device, dtype)


def chain(weight, ids, grad, left_out=None):
    """The definition, one row after the other."""
    total = torch.zeros(weight.shape, device=weight.device)
    for place, row in zip(ids.flatten().tolist(), grad.reshape(-1, weight.shape[1]).float(), strict=True):
        if place != left_out:
            total[place] += row
    return total.to(weight.dtype)


@pytest.mark.parametrize("left_out", [None, 0, 4, -2])
def test_rows_are_added_in_ascending_order(triton_on, triton_dtype, left_out):
    weight, ids, grad = drawn(triton_on, triton_dtype)
    # A negative padding_idx counts from the end.
    expected = chain(weight, ids, grad, left_out if left_out is None else left_out % len(weight))
    for integers in (torch.int32, torch.int64):
        out = embedding(ids.to(integers), weight, left_out)
        assert torch.equal(out, weight[ids])
        for upstream in (torch.stack((grad, grad), -1)[..., 0], torch._neg_view(-grad)):
            (found,) = torch.autograd.grad(out, weight, upstream, retain_graph=True)
            assert torch.equal(found, expected)
            assert not found[-1].any()


def test_rows_without_gradient_change_no_bit(triton_on):
    weight, ids, grad = drawn(triton_on, torch.float32)
    padded, beside = torch.full((3, 71), 2, device=triton_on), torch.zeros(3, 71, WIDTH, device=triton_on)
    padded[:, 20:60], beside[:, 20:60] = ids, grad
    one, other = (
        torch.autograd.grad(embedding(*given, weight), weight, up)[0]
        for given, up in (((ids,), grad), ((padded,), beside))
    )
    assert torch.equal(one, other)


def test_nothing_is_looked_up(triton_on):
    weight = torch.randn(3, 8, device=triton_on, requires_grad=True)
    out = embedding(torch.zeros(2, 0, dtype=torch.long, device=triton_on), weight)
    (found,) = torch.autograd.grad(out, weight, torch.zeros_like(out))
    assert out.shape == (2, 0, 8)
    assert not found.any()


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_invariant_swaps_it(device, kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind(11, 8), nn.Linear(8, 11)).to(device)
    model[1].weight = model[0].weight
    ids = torch.randint(11, (2, 9), device=device)
    model(ids).sum().backward()
    expected, model[0].weight.grad = model[0].weight.grad, None
    with invariant(model, strict=True) as handle:
        assert handle.swapped == {"0": kind.__name__, "1": "Linear"}
        assert isinstance(model[0], kind)
        assert isinstance(model[0], OrderedEmbedding)
        assert isinstance(copy.deepcopy(model)[0], OrderedEmbedding)
        out = model[0](ids)
        if INTERPRETED or device.type == "cuda":
            node = out.grad_fn.next_functions[0][0] if kind is Scaled else out.grad_fn
            assert type(node).__name__ == "_EmbeddingBackward"
        assert torch.equal(out, model[0].weight[ids] * (3.0 if kind is Scaled else 1.0))
        model(ids).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, expected)
    assert type(model[0]) is kind


def test_ids_of_a_rollout_in_inference_mode_serve_the_update(device):
    weight, ids, grad = drawn(device, torch.float32)
    module = OrderedEmbedding(*weight.shape, _weight=weight.detach())
    with torch.inference_mode():
        same_ids = ids.clone()
    (found,), (expected,) = (torch.autograd.grad(module(x), module.weight, grad) for x in (same_ids, ids))
    assert torch.equal(found, expected)


def test_other_gradients_are_pytorchs(device):
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        module = nn.Embedding(5, 4, **option, device=device)
        with invariant(nn.Sequential(module), strict=True):
            out = module(torch.tensor([1, 1], device=device))
        assert type(out.grad_fn).__name__ != "_EmbeddingBackward", option


def test_a_forward_or_a_weight_of_somebodys_stays(device):
    module, other = nn.Embedding(5, 4, device=device), nn.Embedding(5, 4, device=device)
    module.forward = lambda ids: ids.new_zeros(4)
    nn.utils.parametrize.register_parametrization(other, "weight", nn.Identity())
    with invariant(nn.Sequential(module), strict=True) as handle:
        assert not handle.swapped
        assert not handle.left
    with invariant(nn.Sequential(other)) as handle:
        assert not handle.swapped


def test_second_derivatives_and_batches_of_gradients_are_pytorchs(triton_on):
    weight, ids, grad = drawn(triton_on, torch.float32, width=8)
    for look_up in (embedding, torch.nn.functional.embedding):
        loss = look_up(ids, weight).square().sum()
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum() + loss, weight)
        batch = torch.autograd.grad(look_up(ids, weight), weight, torch.stack((grad, -grad)), is_grads_batched=True)[0]
        if look_up is embedding:
            expected = found, batch
    torch.testing.assert_close((found, batch), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_run_gives_the_same_bits_on_a_gpu(dtype):
    """Thousands of places of a few ids, where PyTorch's own differ between runs."""
    weight, ids, grad = drawn(torch.device("cuda"), dtype, ids=13, places=(1024, 17), width=768)
    runs = [torch.autograd.grad(embedding(ids, weight), weight, grad)[0] for _ in range(20)]
    assert all(torch.equal(runs[0], run) for run in runs)
    assert torch.equal(runs[0].cpu(), chain(weight.cpu(), ids.cpu(), grad.cpu()))
