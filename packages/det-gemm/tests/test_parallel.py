"""Linear layers cut over ranks have the bits of one process; bad calls raise the same error on each rank."""

from itertools import product

import pytest
import torch
from torch import distributed

from rl_kernels.core.testing import bits_of
from rl_kernels.core.testing.ranks import run_ranks
from rl_kernels.det_gemm import column_parallel_linear, det_linear, row_parallel_linear

ROWS, IN, OUT, SEGMENTS = (2, 8), 256, 384, 8
DTYPES = (torch.float32, torch.bfloat16)


def operands(dtype, bias=True):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*ROWS, IN, generator=generator).to(dtype)
    weight = (torch.randn(OUT, IN, generator=generator) * IN**-0.5).to(dtype)
    upstream = torch.randn(*ROWS, OUT, generator=generator).to(dtype)
    return x, weight, torch.randn(OUT, generator=generator).to(dtype) if bias else None, upstream


def leaves(*tensors):
    return [None if value is None else value.detach().clone().requires_grad_() for value in tensors]


def gradients(out, upstream, *inputs):
    out.backward(upstream)
    return [None if value is None else value.grad for value in inputs]


def expected(dtype, bias, **segments):
    x, weight, b, upstream = operands(dtype, bias)
    x, weight, b = leaves(x, weight, b)
    out = det_linear(x, weight, b, **segments)
    return [out.detach(), *gradients(out, upstream, x, weight, b)]


def in_ranks(rank, world):
    """Return what differs from one process, in all ranks and in two groups of half, and the errors of bad calls."""
    half, group = world // 2, distributed.group.WORLD
    halves = [distributed.new_group([*range(first, first + half)]) for first in (0, half)]
    failed = differing(rank, world, group) + differing(rank % half, half, halves[rank // half])
    return failed + continued(rank, world, group), errors(rank, world, group)


def differing(rank, world, group):
    """Return the results that have other bits than those of one process."""
    failed = []

    def same(name, found, wanted):
        for result, a, b in zip(("output", "dx", "dweight", "dbias"), found, wanted, strict=True):
            if (a is None) != (b is None) or (a is not None and not bits_of(a).equal(bits_of(b))):
                failed.append((name, result, dtype, bias, dim))

    def part(x, dim):
        return None if x is None or dim is None else x.chunk(world, dim)[rank].contiguous()

    for dtype, bias, dim in product(DTYPES, (True, False), (None, 1)):
        x, weight, b, upstream = operands(dtype, bias)
        out, dx, dw, db = expected(dtype, bias, dx_segments=SEGMENTS)
        mine = leaves(x, part(weight, 0), part(b, 0))
        found = column_parallel_linear(*mine, process_group=group, dx_segments=SEGMENTS, scatter_dim=dim)
        grads = gradients(found, part(upstream, 2), *mine)
        if dim is not None:
            # This rank's slice, and zeros elsewhere.
            whole, dx = dx, torch.zeros_like(dx)
            dx.chunk(world, dim)[rank].copy_(part(whole, dim))
        same("column", [found.detach(), *grads], [part(out, 2), dx, part(dw, 0), part(db, 0)])
        out, dx, dw, db = expected(dtype, bias, k_segments=SEGMENTS)
        mine = leaves(part(x, 2), part(weight, 1), b)
        found = row_parallel_linear(*mine, process_group=group, k_segments=SEGMENTS, scatter_dim=dim)
        if dim is not None:
            upstream, out = part(upstream, dim), part(out, dim)
        grads = gradients(found, upstream, *mine)
        same("row", [found.detach(), *grads], [out, part(dx, 2), part(dw, 1), db])
    return failed


def continued(rank, world, group):
    """Passes add to ``main_grad``; frozen inputs need no exchange; return what is wrong."""
    x, weight, _, upstream = operands(torch.float32)
    whole, mine = leaves(weight, weight.chunk(world, 1)[rank].contiguous())
    whole.main_grad, mine.main_grad = torch.zeros_like(whole), torch.zeros_like(mine)
    part = x.chunk(world, 2)[rank].contiguous()
    for _ in range(2):
        det_linear(x, whole, k_segments=SEGMENTS).backward(upstream)
        row_parallel_linear(part, mine, process_group=group).backward(upstream)
    # What another op adds to .grad goes to main_grad too.
    ((det_linear(x, whole, k_segments=SEGMENTS) * upstream).sum() + whole.sum()).backward()
    out = row_parallel_linear(part, mine, process_group=group)
    ((out * upstream).sum() + mine.sum()).backward()
    wanted = whole.main_grad.chunk(world, 1)[rank]
    is_right = mine.grad is None and bits_of(mine.main_grad).equal(bits_of(wanted))
    return [] if is_right else ["main_grad"]


def errors(rank, world, group):
    x, weight, b, _ = operands(torch.float32)
    half = weight.chunk(world)[rank].contiguous()
    texts = []

    def attempt(function, *args, **options):
        try:
            function(*args, process_group=group, **options)
            texts.append("no error")
        except (TypeError, ValueError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")

    attempt(column_parallel_linear, x if rank else x[:1], half)
    attempt(column_parallel_linear, x, half if rank else half.bfloat16())
    attempt(column_parallel_linear, x, half, dx_segments=8 if rank else 4)
    attempt(column_parallel_linear, x, half[:-16])
    attempt(column_parallel_linear, x, half, dx_segments=1)
    attempt(column_parallel_linear, x, half, dx_length=24)
    attempt(column_parallel_linear, x, half, dx_length=16)
    attempt(column_parallel_linear, x, half, dx_length=64)
    attempt(column_parallel_linear, x[:, :3], half, scatter_dim=1)
    attempt(row_parallel_linear, x, weight, k_segments=3)
    attempt(row_parallel_linear, x, weight.bfloat16() if rank == 1 else weight, b)
    attempt(row_parallel_linear, x, half, scatter_dim=2)
    # Shards of other sizes, each of whole segments; and what else must be the same on all ranks.
    attempt(column_parallel_linear, x, weight[: 128 * (1 + (rank == world - 1))])
    attempt(column_parallel_linear, [1.0] if rank else x, half)
    attempt(column_parallel_linear, x.clone().requires_grad_(rank == 0), half)
    attempt(column_parallel_linear, x, half, scatter_dim=1 if rank else None)
    attempt(row_parallel_linear, x, weight, b if rank else None)
    attempt(row_parallel_linear, x, weight[: 16 * (1 + min(rank, 1))])
    half.main_grad = torch.zeros_like(half, dtype=torch.float64)
    attempt(column_parallel_linear, x, half)
    return texts


def test_ranks():
    world = 4
    results = run_ranks(in_ranks, world, world)
    for failed, _ in results:
        assert failed == []
    texts = results[0][1]
    assert all(other == texts for _, other in results)
    others = ", (2, 8, 256)" * (world - 1)
    wanted = [
        f"ValueError: shape of x: expected the same on every rank of process_group, got (1, 8, 256){others}",
        "TypeError: weight: expected dtype torch.float32 (that of x), got torch.bfloat16 (on rank 0 of process_group)",
        "ValueError: dx_segments: expected the same on every rank of process_group, got 4, 8",
        f"ValueError: weight: expected rows in multiples of 16 for each of {8 // world} segments, got",
        f"ValueError: dx_segments: expected a multiple of the {world} ranks, got 1",
        "ValueError: dx_length: expected a multiple of 16, got 24",
        f"ValueError: weight: expected at most {8 // world} segments of 16 rows, got {OUT // world}",
        f"ValueError: weight: expected {8 // world * 64} rows on each rank before the last, got {OUT // world}, ",
        f"ValueError: x: expected dim 1 to divide by {world} ranks, got shape (2, 3, 256)",
        "ValueError: k_segments: expected one of 1, 2, 4, 8, got 3",
        "TypeError: weight: expected dtype torch.float32 (that of x), got torch.bfloat16 (on rank 1 of process_group)",
        "ValueError: scatter_dim: expected an integer <= 1, got 2",
        "ValueError: weight: expected as many rows on each rank without dx_length, got 128, ",
        "TypeError: x: expected a tensor, got list (on rank 1 of process_group)",
        "ValueError: gradients of x, weight and bias: expected the same on every rank of process_group, got [True,",
        "ValueError: scatter_dim: expected the same on every rank of process_group, got None, 1",
        "ValueError: dtypes of x, weight and bias: expected the same on every rank of process_group, got [torch.float3",
        "ValueError: whole dim of weight: expected the same on every rank of process_group, got 16, 32",
        "TypeError: weight.main_grad: expected dtype float32",
    ]
    assert len(texts) == len(wanted)
    for text, start in zip(texts, wanted, strict=True):
        assert text.startswith(start), text


def test_one_process_needs_no_group():
    for function, segments in ((column_parallel_linear, "dx_segments"), (row_parallel_linear, "k_segments")):
        for dtype, count in product(DTYPES, (1, 2, 4, 8)):
            *inputs, upstream = operands(dtype)
            mine = leaves(*inputs)
            out = function(*mine, **{segments: count})
            found = [out.detach(), *gradients(out, upstream, *mine)]
            wanted = expected(dtype, True, **{segments: count})
            assert all(bits_of(a).equal(bits_of(c)) for a, c in zip(found, wanted, strict=True)), (segments, dtype)


@pytest.mark.parametrize("dim", [0, 1])
def test_one_process_scatters_nothing(dim):
    x, weight, b, _ = operands(torch.float32)
    for function in (column_parallel_linear, row_parallel_linear):
        assert torch.equal(function(x, weight, b, scatter_dim=dim), function(x, weight, b))


def test_no_double_backward():
    x, weight, b, upstream = operands(torch.float32)
    mine = leaves(x, weight, b)
    out = row_parallel_linear(*mine)
    (dx,) = torch.autograd.grad(out, mine[:1], upstream.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dx.sum().backward()
    out.add_(1)


def test_wrong_arguments_raise():
    x, weight, _, _ = operands(torch.float32)
    with pytest.raises(TypeError, match="process_group: expected a ProcessGroup or a DeviceMesh with one dim, got str"):
        row_parallel_linear(x, weight, process_group="tp")
    with pytest.raises(ValueError, match="weight: expected shape"):
        row_parallel_linear(x, weight[:, :8])
