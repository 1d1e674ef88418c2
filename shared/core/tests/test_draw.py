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


def test_the_seed_alone_decides_the_values(device):
    before = torch.get_rng_state()
    expected = everything(Draw(torch.float32, seed=5))
    for value, here in zip(everything(Draw(torch.float32, device, seed=5)), expected, strict=True):
        assert torch.equal(value.cpu(), here)
    assert torch.equal(torch.get_rng_state(), before)
    assert Draw(torch.float32, device).normal(2).device.type == device.type
    assert not torch.equal(Draw(torch.float32, seed=1).normal(9), Draw(torch.float32, seed=2).normal(9))


def test_every_dtype_gets_the_same_values_rounded():
    gold = Draw(torch.float64).normal(100)
    for dtype in DTYPES:
        value = Draw(dtype).normal(100)
        assert value.dtype == dtype
        assert torch.equal(value, gold.to(dtype))
    draw = Draw(torch.bfloat16)
    assert draw.normal(2, dtype=torch.float32).dtype == torch.float32
    assert draw.uniform(0, 1, 2, dtype=torch.float64).dtype == torch.float64


def test_ranges():
    draw = Draw(torch.float64)
    normal, uniform, ids = draw.normal(10_000, scale=3.0), draw.uniform(-1, 3, 10_000), draw.ids(7, 1000)
    assert abs(float(normal.mean())) < 0.15
    assert abs(float(normal.std()) - 3) < 0.15
    assert -1 <= uniform.min() < -0.9
    assert 2.9 < uniform.max() < 3
    assert ids.dtype == torch.int64
    assert set(ids.tolist()) == set(range(7))
    assert int(draw.ids(10**9, 5)[-1]) == 10**9 - 1
    assert {draw.integer(3, 6) for _ in range(100)} == {3, 4, 5}
    assert sorted(draw.permutation(20).tolist()) == list(range(20))
    assert draw.mask(0.0, 50).sum() == 0
    assert draw.mask(1.0, 50).all()
    assert 0.25 < draw.mask(0.3, 10_000).double().mean() < 0.35
