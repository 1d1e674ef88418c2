import pytest
import torch

from rl_kernels.core.testing import Draw

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def everything(draw):
    return [
        draw.normal(3, 4, scale=2.0),
        draw.uniform(-1, 3, 5),
        draw.ids(7, 2, 3),
        draw.mask(0.5, 10),
        draw.permutation(6),
        torch.tensor(draw.integer(2, 100)),
    ]


def test_the_same_seed_gives_the_same_values():
    for left, right in zip(
        everything(Draw(torch.float32, seed=5)), everything(Draw(torch.float32, seed=5)), strict=True
    ):
        assert torch.equal(left, right)


def test_another_seed_gives_other_values():
    assert not torch.equal(Draw(torch.float32, seed=1).normal(9), Draw(torch.float32, seed=2).normal(9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_gets_the_same_values_rounded(dtype):
    gold = Draw(torch.float64).normal(100)
    value = Draw(dtype).normal(100)
    assert value.dtype == dtype
    assert torch.equal(value, gold.to(dtype))


def test_every_device_gets_the_same_values(device):
    for value, expected in zip(everything(Draw(torch.float32, device)), everything(Draw(torch.float32)), strict=True):
        assert torch.equal(value.cpu(), expected)
    assert Draw(torch.float32, device).normal(2).device.type == device.type


def test_draws_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    everything(Draw(torch.float32))
    assert torch.equal(torch.get_rng_state(), before)


def test_ranges():
    draw = Draw(torch.float64)
    normal, uniform, ids = draw.normal(10_000, scale=3.0), draw.uniform(-1, 3, 10_000), draw.ids(7, 1000)
    assert abs(float(normal.mean())) < 0.15
    assert abs(float(normal.std()) - 3) < 0.15
    assert -1 <= uniform.min() < -0.9
    assert 2.9 < uniform.max() < 3
    assert ids.dtype == torch.int64
    assert set(ids.tolist()) == set(range(7))
    assert {draw.integer(3, 6) for _ in range(100)} == {3, 4, 5}
    assert sorted(draw.permutation(20).tolist()) == list(range(20))


def test_mask_density():
    draw = Draw(torch.float32)
    assert draw.mask(0.0, 50).sum() == 0
    assert draw.mask(1.0, 50).all()
    assert 0.25 < draw.mask(0.3, 10_000).double().mean() < 0.35


def test_a_dtype_of_its_own():
    draw = Draw(torch.bfloat16)
    assert draw.normal(2, dtype=torch.float32).dtype == torch.float32
    assert draw.uniform(0, 1, 2, dtype=torch.float64).dtype == torch.float64
