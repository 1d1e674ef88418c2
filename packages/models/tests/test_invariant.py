"""invariant(): what it changes in a model, what it leaves, and that it gives all of it back."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from rl_kernels.core import CanaryMismatch, canary
from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import DetLinear, det_linear
from rl_kernels.models import invariant, swap


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(24), nn.Linear(24, 40), nn.SiLU()
        self.scale, self.down = nn.RMSNorm(40), nn.Linear(40, 24, bias=False)

    def forward(self, x):
        return x + self.down(self.scale(self.act(self.up(self.norm(x)))))


def model():
    torch.manual_seed(0)
    made = nn.Sequential(Block(), Block())
    for value in made.parameters():
        if value.ndim == 1:
            nn.init.uniform_(value, 0.5, 1.5)
    return made


def classes(made):
    return [type(module) for module in made.modules()]


@pytest.fixture
def x():
    return Draw(torch.float32, seed=3).normal(37, 24)


@pytest.mark.smoke
def test_batch_invariant_and_close_to_the_model(x):
    made, upstream = model(), Draw(torch.float32, seed=5).normal(37, 24)

    def gradients(rows=slice(None)):
        leaf = x[rows].clone().requires_grad_()
        return torch.autograd.grad(made(leaf), [leaf, *made.parameters()], upstream[rows])

    plain = made(x), *gradients()
    with invariant(made):
        found = whole, dx, *_ = made(x), *gradients()
        for rows in (1, 2, 3, 16, 17):
            for part in (slice(rows), slice(len(x) - rows, len(x))):
                assert torch.equal(made(x[part]), whole[part]), rows
        for part in (slice(5), slice(36, 37)):
            assert torch.equal(gradients(part)[0], dx[part])
    torch.testing.assert_close(whole, plain[0], rtol=1e-5, atol=1e-5)
    for value, other in zip(found, plain, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-4)


def test_model_stays_the_object_it_was(x):
    made, calls = model(), []
    made[1].up.weight = made[0].up.weight
    made[0].down.requires_grad_(False)
    made[1].train(False)
    made[0].up.register_forward_hook(lambda *_: calls.append(1))
    before = {name: value.data_ptr() for name, value in made.state_dict(keep_vars=True).items()}
    modules, kept = list(made.modules()), list(made.parameters())
    training = [module.training for module in made.modules()]
    with invariant(made) as handle:
        assert {name: value.data_ptr() for name, value in made.state_dict(keep_vars=True).items()} == before
        assert all(one is other for one, other in zip(made.modules(), modules, strict=True))
        assert all(one is other for one, other in zip(made.parameters(), kept, strict=True))
        assert made[1].up.weight is made[0].up.weight
        assert [module.training for module in made.modules()] == training
        assert not made[0].down.weight.requires_grad
        made(x)
        assert calls == [1]
        assert isinstance(made[0].up, DetLinear)
        assert isinstance(made[0].norm, nn.LayerNorm)
        assert handle.swapped["0.up"] == "Linear"
        assert not handle.left
    assert calls == [1]


@pytest.mark.smoke
def test_undo_and_an_exception_give_everything_back(x):
    made, others = model(), set(swap._held)
    before, plain = classes(made), made(x)
    handle = invariant(made)
    assert classes(made) != before
    handle.undo()
    handle.undo()
    assert classes(made) == before
    with pytest.raises(KeyError), invariant(made):
        raise KeyError
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got function"):
        invariant(model)
    assert classes(made) == before
    assert torch.equal(made(x), plain)
    assert swap._held.keys() <= others


def test_a_swap_that_fails_leaves_nothing_half_done(monkeypatch):
    made, others = model(), set(swap._held)
    before = classes(made)
    real, count = swap.class_swap, []

    def failing(other, original):
        count.append(1)
        if len(count) == 4:
            raise MemoryError
        return real(other, original)

    monkeypatch.setattr("rl_kernels.models.invariance.class_swap", failing)
    with pytest.raises(MemoryError):
        invariant(made)
    assert classes(made) == before
    assert swap._held.keys() <= others


def test_nested_in_any_order():
    made = model()
    before = classes(made)
    for inner_first in (True, False):
        outer, inner = invariant(made), invariant(made[0])
        swapped = classes(made[0])
        first, last = (inner, outer) if inner_first else (outer, inner)
        first.undo()
        assert classes(made[0]) == swapped
        last.undo()
        assert classes(made) == before


def test_a_model_that_is_never_given_back_is_not_kept_alive():
    made, others = model(), set(swap._held)
    gone = weakref.ref(made[0].up)
    invariant(made)
    del made
    gc.collect()
    assert gone() is None
    assert swap._held.keys() <= others


def test_linear_layers_and_their_copies(x):
    """A DetLinear stays one, and a deep or shallow copy of a swapped layer is swapped too, until a handle undoes it."""
    made = nn.Sequential(DetLinear(24, 24), nn.Linear(24, 8))
    layer = made[1]
    with invariant(made) as handle:
        assert dict(handle.swapped) == {"1": "Linear"}
        twin, other, shallow = copy.deepcopy(layer), copy.deepcopy(layer), copy.copy(layer)
        for each in (layer, twin, other, shallow):
            assert torch.equal(each(x), det_linear(x, layer.weight, layer.bias))
        assert type(shallow) is type(layer)
    assert classes(made) == [nn.Sequential, DetLinear, nn.Linear]
    assert shallow.weight is layer.weight
    assert isinstance(twin, DetLinear)
    assert dict(invariant(other).swapped) == {"": "Linear"}
    for each in (twin, other):
        invariant(each).undo()
    # The handle of the other, which nobody kept, holds it still.
    assert (type(twin), isinstance(other, DetLinear)) == (nn.Linear, True)


def test_undo_after_a_parametrization(x):
    made = nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24))
    handle = invariant(made)
    nn.utils.parametrizations.weight_norm(made[0])
    handle.undo()
    assert type(made[0]).__name__ == "ParametrizedLinear"
    assert not isinstance(made[0], DetLinear)
    nn.utils.parametrize.remove_parametrizations(made[0], "weight")
    assert classes(made) == [nn.Sequential, nn.Linear, nn.LayerNorm]


def test_undo_after_fully_shard(x, one_process):
    made = model()
    before, plain = classes(made), made(x).detach()
    handle = invariant(made)
    for block in made:
        fully_shard(block.up)
        fully_shard(block)
    fully_shard(made)
    handle.undo()
    assert type(made[0].up).__mro__[1:4] == (FSDPModule, nn.Linear, nn.Module)
    assert [kind.__mro__[2] if issubclass(kind, FSDPModule) else kind for kind in classes(made)] == before
    assert torch.equal(made(x), plain)


def test_compiled_in_one_graph_and_again_after_undo(x):
    torch.compiler.reset()
    made, upstream = model(), Draw(torch.float32, seed=6).normal(37, 24)
    run = torch.compile(made, fullgraph=True, backend="aot_eager")
    plain = run(x).detach()
    with invariant(made):
        found, expected = run(x), made(x)
        assert torch.equal(found, expected)
        assert not torch.equal(found, plain)
        grads = [torch.autograd.grad(out, list(made.parameters()), upstream) for out in (found, expected)]
        assert all(torch.equal(value, other) for value, other in zip(*grads, strict=True))
    assert torch.equal(run(x), plain)


@pytest.mark.gpu
def test_invariant_looks_before_it_swaps(monkeypatch):
    monkeypatch.setattr(canary, "_passed", set())
    arch = f"sm{''.join(map(str, torch.cuda.get_device_capability()))}"
    wrong = {"fp32": {"forward": "0" * 64}}
    monkeypatch.setattr(canary, "records_of", lambda canary: {arch: {"triton": wrong}})
    layer = torch.nn.Linear(16, 16, device="cuda")
    with pytest.raises(CanaryMismatch):
        invariant(layer)
    assert type(layer) is torch.nn.Linear
