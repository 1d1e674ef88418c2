"""Weights in FP32 that an optimizer updates, and the 16-bit ones that a model computes with."""

import copy

import pytest
import torch
from torch import nn

from rl_kernels.models import MasterWeights

BF16 = torch.bfloat16


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 8, generator=generator).to(BF16) for _ in range(count)]


def loss_of(model, x):
    return model(x).float().square().mean()


def trained(model, optimizer, steps, *, norm=None):
    for x in steps:
        for part in x.split(3):
            loss_of(model, part).backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()


def with_masters(lr):
    model = model_of()
    masters = MasterWeights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    masters.update_by(optimizer)
    return model, optimizer


@pytest.mark.parametrize("norm", [None, 1e-3])
def test_steps_are_those_of_fp32_weights_that_are_rounded_for_each_pass(norm):
    model, optimizer = with_masters(1e-3)
    trained(model, optimizer, batches(4), norm=norm)
    expected = model_of()
    plain, passes = torch.optim.AdamW(expected.parameters(), 1e-3), copy.deepcopy(expected).to(BF16)
    for x in batches(4):
        for part in x.split(3):
            passes.load_state_dict(expected.state_dict())
            passes.zero_grad()
            loss_of(passes, part).backward()
            for weight, rounded in zip(expected.parameters(), passes.parameters(), strict=True):
                grad = rounded.grad.float()
                weight.grad = grad if weight.grad is None else weight.grad + grad
        if norm is not None:
            nn.utils.clip_grad_norm_(expected.parameters(), norm)
        plain.step()
        plain.zero_grad()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight, rounded, own in zip(expected.parameters(), model.parameters(), weights, strict=True):
        assert rounded.dtype == BF16
        assert torch.equal(own, weight)
        assert torch.equal(rounded, weight.to(BF16))


def test_a_small_learning_rate_moves_weights_that_bf16_would_keep():
    model, optimizer = with_masters(1e-6)
    before = [weight.clone() for group in optimizer.param_groups for weight in group["params"]]
    rounded = copy.deepcopy(model_of()).to(BF16)
    start = copy.deepcopy(rounded)
    trained(rounded, torch.optim.AdamW(rounded.parameters(), 1e-6), batches(5))
    trained(model, optimizer, batches(5))
    after = [weight for group in optimizer.param_groups for weight in group["params"]]
    moved = sum(int((a != b).sum()) for a, b in zip(after, before, strict=True))
    stuck = sum(int((a == b).sum()) for a, b in zip(rounded.parameters(), start.parameters(), strict=True))
    total = sum(weight.numel() for weight in before)
    assert moved > 0.99 * total
    assert stuck > 0.9 * total


def test_training_goes_on_from_a_saved_state_bit_for_bit():
    model, optimizer = with_masters(1e-3)
    trained(model, optimizer, batches(4)[:2])
    state = copy.deepcopy(optimizer.state_dict())
    trained(model, optimizer, batches(4)[2:])
    other, resumed = with_masters(1e-3)
    resumed.load_state_dict(state)
    trained(other, resumed, batches(4)[2:])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"state_dict: expected one with FP32 weights"):
        resumed.load_state_dict(torch.optim.AdamW(model_of().parameters()).state_dict())


def test_gradients_that_were_cleared_or_used_take_part_in_no_step():
    for clear in (lambda model, optimizer: optimizer.zero_grad(), lambda model, optimizer: model.zero_grad()):
        model, optimizer = with_masters(1e-3)
        loss_of(model, batches(3)[2]).backward()
        clear(model, optimizer)
        trained(model, optimizer, batches(2))
        other, usual = with_masters(1e-3)
        trained(other, usual, batches(2))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_settings_of_single_weights_reach_the_fp32_ones():
    """As bitsandbytes has them, which transformers asks for 32-bit state of embeddings."""
    model, asked = model_of(), {}

    class Manager:
        module_weight_config_triple = ((model[0], "weight", {"optim_bits": 32}), (nn.Linear(2, 2), "weight", {}))

        def override_config(self, weight, key_value_dict):
            asked[weight] = key_value_dict

    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.mng = Manager()
    MasterWeights(model).update_by(optimizer)
    assert asked == {optimizer.param_groups[0]["params"][0]: {"optim_bits": 32}}


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(TypeError, match=r"^model: expected an nn.Module"):
        MasterWeights(3)
    with pytest.raises(ValueError, match=r"^dtype"):
        MasterWeights(model_of(), torch.float64)
    model = model_of()
    masters = MasterWeights(model)
    with pytest.raises(ValueError, match=r"^optimizer: expected one with parameters of the model"):
        masters.update_by(torch.optim.SGD(model_of().parameters(), 1.0))
    stepped = torch.optim.AdamW(model.parameters())
    stepped.state[next(model.parameters())] = {"step": 1}
    with pytest.raises(ValueError, match=r"^optimizer: expected one that has taken no step"):
        masters.update_by(stepped)
