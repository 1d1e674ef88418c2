"""Sums over ranks have the order that they promise, and ranks that disagree all raise the same error."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from rl_kernels.core.distributed import (
    agree,
    agree_on_kind,
    all_gather,
    all_reduce,
    chain_sum,
    exchange,
    fingerprint,
    group_of,
    reduce_scatter,
    split,
    symmetric,
    tree_sum,
)
from rl_kernels.core.testing import bits_of
from rl_kernels.core.testing.ranks import run_ranks

SHAPES = [(), (1,), (5, 3), (8, 4), (2, 16, 6), (0, 4)]


def parts_of(shape, world, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    scale = 10.0 ** torch.randint(-3, 4, (world, *shape), generator=generator)
    return (torch.randn(world, *shape, generator=generator) * scale).to(dtype)


def test_memory_of_a_window_is_writable_after_a_rollout_in_inference_mode():
    window = object.__new__(symmetric.Window)
    window.parts = 0
    window.handle = SimpleNamespace(get_buffer=lambda _, shape, dtype, __: torch.zeros(shape, dtype=dtype))
    with torch.inference_mode():
        part = window.slice_of(0, 0, (3,))
    assert torch.equal(part.add_(1.0), torch.ones(3))


def test_tree_is_balanced():
    parts = torch.tensor([1e8, 1.0, -1e8, 1.0, 3.0, 1e-8, 5.0, 7.0])
    a, b, c, d, e, f, g, h = parts
    assert tree_sum(parts) == ((a + b) + (c + d)) + ((e + f) + (g + h))
    assert tree_sum(list(parts[:3])) == (a + b) + c
    assert tree_sum(parts[:5]) == ((a + b) + (c + d)) + e
    assert tree_sum(parts[:1]) == a
    assert chain_sum(parts) == ((((((a + b) + c) + d) + e) + f) + g) + h
    # The two orders differ for these numbers, so the tests below can tell them apart.
    assert tree_sum(parts) != chain_sum(parts)


def unlike(message, function, *args, **options):
    """Return what is wrong with the ``ValueError`` that a call must raise."""
    try:
        function(*args, **options)
    except ValueError as error:
        return [] if message in str(error) else [str(error)]
    return [f"nothing was raised: {message}"]


def sums(rank, world):
    group = group_of(distributed.group.WORLD)
    # Ranks have the environment of the call, whichever process they are forks of.
    failed = [] if os.environ["TOY_WORLD"] == str(world) else ["environment"]

    def same(name, found, wanted):
        if found.dtype != wanted.dtype or found.shape != wanted.shape or not bits_of(found).equal(bits_of(wanted)):
            failed.append((name, found, wanted))

    for few in (8 << 20, 0):
        exchange.FEW_BYTES = few
        for shape in SHAPES:
            parts = parts_of(shape, world)
            same(("tree", few, shape), all_reduce(parts[rank], group), tree_sum(parts))
            half = parts_of(shape, world, torch.bfloat16)
            same(("chain", few, shape), all_reduce(half[rank], group, order="chain"), chain_sum(half))
            if shape:
                bias = torch.randn(shape[-1], generator=torch.Generator().manual_seed(1)).bfloat16()
                found = all_reduce(parts[rank], group, bias=bias, dtype=torch.bfloat16)
                same(("bias", few, shape), found, (tree_sum(parts) + bias.float()).bfloat16())
                same(("gather", shape), all_gather(parts[rank], group), torch.cat(list(parts)))
        for dim, shape in ((0, (8, 3)), (1, (2, 8, 3)), (-1, (3, 8)), (1, (3, 8, 2)), (-2, (3, 8, 2))):
            parts = parts_of(shape, world).transpose(-1, -2).contiguous().transpose(-1, -2)
            mine = tree_sum(parts).chunk(world, dim)[rank].contiguous()
            same(("scatter", dim), reduce_scatter(parts[rank], group, dim=dim), mine)
            chained = chain_sum(parts).chunk(world, dim)[rank].contiguous()
            same(("scatter chain", dim), reduce_scatter(parts[rank], group, dim=dim, order="chain"), chained)
            same(("gather", dim), all_gather(mine, group, dim), tree_sum(parts).contiguous())
            if dim % len(shape) < len(shape) - 1:
                bias = torch.randn(shape[-1], generator=torch.Generator().manual_seed(1)).bfloat16()
                found = reduce_scatter(parts[rank], group, dim=dim, bias=bias, dtype=torch.bfloat16)
                wanted = (tree_sum(parts) + bias.float()).bfloat16().chunk(world, dim)[rank].contiguous()
                same(("scatter bias", dim), found, wanted)
    failed += gradients(rank, world, group)
    biased = {"dim": 1, "bias": torch.zeros(world)}
    failed += unlike("bias: expected None with dim 1", reduce_scatter, torch.zeros(3, world), group, **biased)
    failed += unlike("expected dim 0 to divide", reduce_scatter, torch.zeros(world + 1), group)
    failed += kinds_that_are_compared(rank, group)
    return failed, agreements(rank, group)


def gradients(rank, world, group):
    """Return which gradients are not those of a loss that every rank computes alike."""
    failed = []
    parts, upstream = parts_of((4, 8), world), torch.randn(4, 8, generator=torch.Generator().manual_seed(2))

    def passed(name, x, out, up, wanted):
        (found,) = torch.autograd.grad(out, x, up)
        if found.dtype != wanted.dtype or not found.equal(wanted):
            failed.append(name)

    x = parts[rank].clone().requires_grad_()
    out = all_reduce(x, group, dtype=torch.bfloat16)
    passed("all_reduce", x, out, upstream.bfloat16(), upstream.bfloat16().float())
    for dim in (0, 1):
        mine = upstream.chunk(world, dim)[rank]
        passed("reduce_scatter", x, reduce_scatter(x, group, dim=dim), mine, upstream)
        passed("split", x, split(x, group, dim), mine, upstream)
        x_part = parts[0].chunk(world, dim)[rank].clone().requires_grad_()
        passed("all_gather", x_part, all_gather(x_part, group, dim), upstream, mine)
    if all_reduce(parts[rank], group).requires_grad or all_gather(parts[rank], group).requires_grad:
        failed.append("requires_grad")
    bias = torch.zeros(8, requires_grad=True)
    return failed + unlike("expected a tensor that does not require grad", all_reduce, parts[rank], group, bias=bias)


def agreements(rank, group):
    """Return the texts of errors, which must be equal on all ranks, and what other ranks sent."""
    x = torch.arange(12.0).reshape(3, 4)
    texts = []

    def attempt(*args):
        try:
            agree(*args)
        except (TypeError, ValueError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")

    attempt("f", group, TypeError("hidden: expected BF16") if rank == 1 else None, {})
    attempt("f", group, KeyError("x") if rank == 1 else None, {})
    attempt("f", group, None, {"hidden": (4, 8 if rank == 0 else 9)})
    attempt("f" if rank else "g", group, None, {})
    attempt("f", group, None, {"hidden": "y" * 100 + str(rank)})
    attempt("f", group, None, {"hidden": fingerprint(x + rank)})
    attempt("f", group, None, {"hidden": 1, "ids": rank})
    attempt("f", group, None, {"mask": 1} if rank else {})
    own = agree("f", group, None, {"hidden": fingerprint(x)}, {"rows": rank + 3})
    return texts, own


def kinds_that_are_compared(rank, group):
    """Return what is wrong with the calls that ranks compare: the first of a kind, and all where that is asked for."""
    compared = []

    def call(kind, validate=True, error=None, *, differs=False):
        def same():
            compared.append(kind)
            return {"x": rank if differs else 0}

        try:
            agree_on_kind("f", group, validate, kind, error, same)
        except ValueError as raised:
            compared.append(str(raised)[:3])

    call("new")
    call("new", differs=True)
    call("new", "ranks")
    call("new", error=ValueError("own error") if rank == 1 else None)
    call("off", False, differs=True)
    call("bad", differs=True)
    call("bad", differs=True)
    distributed.set_debug_level(distributed.DebugLevel.DETAIL)
    call("new")
    distributed.set_debug_level(distributed.DebugLevel.OFF)
    own = ["own"] if rank == 1 else []
    return [] if compared == ["new", "new", *own, "bad", "x: ", "bad", "x: ", "new"] else compared


@pytest.mark.parametrize("world", [2, 4])
def test_sums_gradients_and_agreement_of_ranks(world, monkeypatch):
    monkeypatch.setenv("TOY_WORLD", str(world))
    results = run_ranks(sums, world, world)
    for failed, _ in results:
        assert failed == []
    texts, own = results[0][1]
    assert all(others == (texts, own) for _, others in results)
    assert own == [{"rows": rank + 3} for rank in range(world)]
    assert texts[0] == "TypeError: hidden: expected BF16 (on rank 1 of process_group)"
    assert texts[1].startswith("RuntimeError: 'x' (on rank 1")
    others = ", (4, 9)" * (world - 1)
    assert texts[2] == f"ValueError: hidden: expected the same on every rank of process_group, got (4, 8){others}"
    assert texts[3].startswith("ValueError: function: expected the same")
    assert texts[6].startswith("ValueError: ids: expected the same on every rank of process_group, got 0, 1")
    assert texts[7].startswith("ValueError: mask: expected the same on every rank of process_group, got nothing, 1")
    assert len(texts) == 8


def test_fingerprint_and_the_argument_of_a_group():
    x = torch.randn(7, 5)
    assert fingerprint(x) == fingerprint(x.clone()) == fingerprint(x.t().contiguous().t())
    others = [x.flip(0), x.flip(1), -x, x.bfloat16(), x.t(), x[:6], x.double(), x.view(torch.int32) + 1]
    assert len({fingerprint(x), *map(fingerprint, others)}) == len(others) + 1
    assert fingerprint(x[:0]) == 0
    assert fingerprint(torch.tensor(True)) != fingerprint(torch.tensor(False))
    with pytest.raises(TypeError, match="process_group: expected a ProcessGroup or a DeviceMesh with one dim, got str"):
        group_of("tp")
    with pytest.raises(ValueError, match="a group that this process belongs to"):
        group_of(distributed.GroupMember.NON_GROUP_MEMBER)
