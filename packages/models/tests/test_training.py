"""A model of DetLinear trains, and its weight gradients survive another split and another packing, bit for bit."""

import pytest
import torch
from torch import nn

from rl_kernels.core.rowwise.operands import pad_to
from rl_kernels.core.testing import Draw
from rl_kernels.models import invariant

LENGTHS = (16, 7, 33, 1, 20, 48)
WIDTH = 12


def model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)).to(dtype)


def sequences(dtype):
    """Return rows of each sequence, and what is wanted of them."""
    draw = Draw(torch.float32, seed=11)
    truth = draw.normal(WIDTH, 3)
    rows = [draw.normal(length, WIDTH) for length in LENGTHS]
    return [(x.to(dtype), (x @ truth).tanh().to(dtype)) for x in rows]


def packed(batch):
    """Pack sequences, each followed by zero rows up to a multiple of 16; a row of padding wants nothing."""
    x, target = (torch.cat([pad_to(value[i], 0, 16) for value in batch]) for i in (0, 1))
    real = torch.cat([pad_to(torch.ones(len(value[0]), 1), 0, 16) for value in batch])
    return x, target, real


def train(dtype, packs, steps=6):
    """Train in the given packs of sequences; return the losses, and every step's FP32 weight gradients and weights."""
    made, data, losses, record = model(dtype), sequences(dtype), [], []
    weights = [layer.weight for layer in made if isinstance(layer, nn.Linear)]
    with invariant(made):
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape)
        for _ in range(steps):
            loss = 0.0
            for pack in packs:
                x, target, real = packed([data[index] for index in pack])
                part = ((made(x) - target).float().square() * real).sum() / sum(LENGTHS)
                part.backward()
                loss += float(part.detach())
            losses.append(loss)
            with torch.no_grad():
                for weight in weights:
                    record.append(weight.main_grad.clone())
                    weight -= (0.3 * weight.main_grad).to(dtype)
                    weight.main_grad.zero_()
                    record.append(weight.clone())
    return losses, record


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_a_training_do_not_follow_the_packing(dtype, monkeypatch):
    losses, whole = train(dtype, [range(6)])
    assert losses[-1] < 0.7 * losses[0]
    for packs in ([range(3), range(3, 6)], [[index] for index in range(6)], [[0, 1], [2], [3, 4, 5]]):
        _, found = train(dtype, packs)
        assert all(torch.equal(value, other) for value, other in zip(found, whole, strict=True))
    # The control: cut where no step of the chain ends, the gradient has other bits.
    monkeypatch.setitem(globals(), "pad_to", lambda value, dim, multiple: value)
    plain = [train(torch.float32, packs, steps=1)[1] for packs in ([range(6)], [[index] for index in range(6)])]
    assert not all(torch.equal(value, other) for value, other in zip(*plain, strict=True))
