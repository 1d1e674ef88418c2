"""DDP and FSDP2 with ordered gradients: five steps give the weights of one process with the same micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rl_kernels.core.testing import Draw
from rl_kernels.core.testing.ranks import run_ranks
from rl_kernels.grpo_loss import Normalizer, group_advantages, grpo_loss, grpo_loss_from_advantages
from rl_kernels.models import data_parallel, head_logp, invariant
from rl_kernels.models.data_parallel import OrderedReduceScatter, clip_grad_norm, ordered_gradients, ordered_hook

VOCAB, WIDTH, LENGTH, STEPS, EACH = 37, 12, 9, 5, 3
WAYS = ("ddp", "fsdp")
Trained = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Weights, and the gradient norm of each step."""


class Policy(nn.Module):
    """Log-probabilities of the tokens of ids, each from the token before."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids[:, :-1])
        for block in self.blocks:
            hidden = hidden + block(hidden).relu()
        found = head_logp(self.head, hidden, ids[:, 1:])
        assert isinstance(found, torch.Tensor)
        return found


def batch(world: int, step: int) -> tuple[torch.Tensor, ...]:
    """Return ids, rewards and mask of all ranks."""
    draw = Draw(torch.float32, seed=step)
    count = EACH * world
    ids = draw.ids(VOCAB, count * (LENGTH + 1)).reshape(count, LENGTH + 1)
    return ids, draw.normal(count), draw.mask(0.8, count, LENGTH)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def alone(world: int, dtype: torch.dtype) -> Trained:
    """Train one process on the micro-batches of all ranks, one after the other; return weights, and the norms."""
    model = Policy(dtype)
    invariant(model)
    optimizer, norms = optimizer_of(model), []
    for step in range(STEPS):
        ids, rewards, mask = batch(world, step)
        advantages = group_advantages(rewards, samples_per_prompt=world * EACH // 2)
        normalizer = Normalizer(num_tokens=mask.sum())
        for rank in range(world):
            own = slice(rank * EACH, (rank + 1) * EACH)
            logps = model(ids[own])
            grpo_loss_from_advantages(
                logps, logps.detach() - 0.1, None, advantages[own], mask[own], normalizer=normalizer
            ).loss.backward()
        norms.append(clip_grad_norm(model.parameters(), 0.01))
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach() for value in model.parameters()], norms


def wrapped(way: str, dtype: torch.dtype, group: ProcessGroup) -> nn.Module:
    model = Policy(dtype)
    invariant(model)
    if way == "ddp":
        # Small buckets, so that there are several.
        replicated = DistributedDataParallel(model, bucket_cap_mb=0.001, process_group=group)
        if dtype == torch.float32:
            return ordered_gradients(replicated)
        replicated.register_comm_hook(None, ordered_hook)
        return replicated
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    return ordered_gradients(fully_shard(model, mesh=mesh))


def together(way: str, dtype: torch.dtype, group: ProcessGroup) -> Trained:
    """Train on this rank's micro-batch of each step; return whole weights, and each step's norm."""
    model, world, rank = wrapped(way, dtype, group), group.size(), group.rank()
    optimizer, norms = optimizer_of(model), []
    own = slice(rank * EACH, (rank + 1) * EACH)
    for step in range(STEPS):
        ids, rewards, mask = (x[own] for x in batch(world, step))
        logps = model(ids)
        options = {"samples_per_prompt": world * EACH // 2, "process_group": group}
        grpo_loss(logps, logps.detach() - 0.1, None, rewards, mask, **options).loss.backward()
        norms.append(clip_grad_norm(model.parameters(), 0.01))
        optimizer.step()
        optimizer.zero_grad()
    weights = [value.detach() for value in model.parameters()]
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in weights], norms


def differing(found: Trained, expected: Trained) -> int:
    """Return the number of other bytes."""
    pairs = zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True)
    flat = [[x.reshape(-1).contiguous().view(torch.uint8) for x in pair] for pair in pairs]
    return sum(int((a != b).sum()) for a, b in flat)


def in_ranks(rank: int, expected: dict[tuple[int, torch.dtype], Trained]) -> dict[str, int]:
    """Train in all four ranks, and in two groups of two of them; return differing bytes."""
    whole = distributed.group.WORLD
    pairs = [distributed.new_group(ranks) for ranks in ((0, 1), (2, 3))]
    found = {}
    for way in WAYS:
        for dtype in (torch.float32, torch.bfloat16):
            found[f"{way} {dtype}"] = differing(together(way, dtype, whole), expected[4, dtype])
        found[f"{way} in pairs"] = differing(together(way, torch.float32, pairs[rank // 2]), expected[2, torch.float32])
    with pytest.MonkeyPatch.context() as patch:
        # The control: another order of ranks.
        patch.setattr(data_parallel, "CHAIN", "tree")
        for way in WAYS:
            found[f"{way} in a tree"] = differing(together(way, torch.float32, whole), expected[4, torch.float32])
    refusals()
    return found | averages(rank)


def averages(rank: int) -> dict[str, int]:
    """Return differing bytes of averaged gradients, where each rank's loss is a mean of its own."""
    found, one = {}, nn.Linear(WIDTH, 7)
    x = Draw(torch.float32, seed=3).normal(4, 5, WIDTH)
    start = {name: value.clone() for name, value in one.state_dict().items()}
    for value in start.values():
        distributed.broadcast(value, 0)
    one.load_state_dict(start)
    for row in x:
        (one(row).square().mean() / 4).backward()
    for way in WAYS:
        model = nn.Linear(WIDTH, 7)
        model.load_state_dict(start)
        model = DistributedDataParallel(model) if way == "ddp" else fully_shard(model)
        ordered_gradients(model, average=True)(x[rank]).square().mean().backward()
        grads = [value.grad for value in model.parameters()]
        grads = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
        found[f"{way} average"] = differing((grads, []), ([value.grad for value in one.parameters()], []))
    return found


def refusals() -> None:
    mesh = init_device_mesh("cpu", (1, distributed.get_world_size()), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(nn.Linear(WIDTH, 7), mesh=mesh)
    with pytest.raises(ValueError, match="module: expected FSDP2 over a mesh with one dim, got 2 dims"):
        ordered_gradients(model)
    alone = fully_shard(nn.Linear(WIDTH, 7))
    alone.set_custom_reduce_scatter(OrderedReduceScatter())
    with pytest.raises(ValueError, match="op: expected a sum"):
        alone(torch.ones(2, WIDTH)).sum().backward()


def test_training_over_ranks_has_the_bits_of_one_process() -> None:
    torch.set_num_threads(1)
    expected = {key: alone(*key) for key in ((4, torch.float32), (4, torch.bfloat16), (2, torch.float32))}
    for (_, dtype), (weights, norms) in expected.items():
        start = [value.detach() for value in Policy(dtype).parameters()]
        assert all((a != b).any() for a, b in zip(weights, start, strict=True))
        assert all(norm > 0.01 for norm in norms)
    for found in run_ranks(in_ranks, 4, expected):
        assert all(found.pop(f"{way} in a tree") for way in WAYS)
        assert set(found.values()) == {0}, found


def test_other_modules_and_versions_of_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nn.Linear(2, 2), None):
        with pytest.raises(TypeError, match="module: expected DistributedDataParallel or a module under fully_shard"):
            ordered_gradients(module)

    class Sharded(nn.Linear, FSDPModule):
        def __new__(cls, *args: Any) -> Sharded:
            return object.__new__(cls)

    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(RuntimeError, match=r"ordered_gradients: FSDP2 of torch .* has no set_custom_reduce_scatter"):
        ordered_gradients(Sharded(2, 2))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norm_is_that_of_torch(dtype: torch.dtype) -> None:
    draw = Draw(torch.float32, seed=4)
    values = [nn.Parameter(draw.normal(*shape).to(dtype)) for shape in ((5000,), (3, 7, 2), (1, 0))]
    values.append(nn.Parameter(torch.tensor(2.0)))
    for scale, most in ((1.0, 3.0), (1e-3, 3.0)):
        for value in values:
            value.grad = value.detach() * scale
        before = [value.grad.clone() for value in values]
        expected = torch.cat([grad.double().flatten() for grad in before]).norm()
        found = clip_grad_norm(iter(values), most)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
        factor = min(most / float(expected), 1.0)
        for value, grad in zip(values, before, strict=True):
            torch.testing.assert_close(value.grad, (grad.double() * factor).to(value.dtype), rtol=1e-2, atol=1e-6)
    assert clip_grad_norm(nn.Parameter(torch.ones(2)), 1.0) == 0
    with pytest.raises(ValueError, match="max_norm: expected a number > 0"):
        clip_grad_norm(values, 0.0)
