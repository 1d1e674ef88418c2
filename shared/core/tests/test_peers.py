"""The kernels that read other ranks' memory, on one machine: a table of addresses stands for the ranks."""

from types import SimpleNamespace

import pytest
import torch

from rl_kernels.core.distributed import tree_sum
from rl_kernels.core.testing import bits_of
from rl_kernels.core.triton_lib.launch import INSTALLED, INTERPRETED

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not (INSTALLED and INTERPRETED), reason="needs the interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
START = 64


def memories(ranks, nbytes, device):
    """Return the memory of each rank, and a handle with their addresses."""
    found = [torch.zeros(START + nbytes, dtype=torch.uint8, device=device) for _ in range(ranks)]
    table = torch.tensor([memory.data_ptr() for memory in found], device=device)
    return found, SimpleNamespace(buffer_ptrs_dev=table.data_ptr(), table=table)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shape", [(3, 5), (7, 1024), (5, 3000)])
def test_sums_and_slices(device, ranks, shape):
    from rl_kernels.core.triton_lib import peers

    generator = torch.Generator().manual_seed(ranks)
    scale = 10.0 ** torch.randint(-3, 4, (ranks, *shape), generator=generator)
    parts = (torch.randn(ranks, *shape, generator=generator) * scale).to(device)
    bias = torch.randn(shape[-1], generator=generator).to(device)
    whole = (tree_sum(parts) + bias).flatten()
    found, handle = memories(ranks, parts[0].nbytes, device)
    for memory, part in zip(found, parts, strict=True):
        memory[START:].view(torch.float32).copy_(part.flatten())

    each = peers.aligned(-(-whole.numel() // ranks))
    slices, of_sums = memories(ranks, whole.nbytes, device)
    for rank, memory in enumerate(slices):
        first, end = min(rank * each, whole.numel()), min((rank + 1) * each, whole.numel())
        sums = memory[START:].view(torch.float32)
        peers.add_parts(handle, START, torch.Size(shape), first, end, sums, bias, ranks)
        assert bits_of(sums[first:end]).equal(bits_of(whole[first:end]))
        assert not sums[:first].any()
        assert not sums[end:].any()
        mine = torch.full((end - first,), torch.nan, device=device)
        peers.add_parts(handle, START, torch.Size(shape), first, end, mine, bias, ranks, at=first)
        assert bits_of(mine).equal(bits_of(whole[first:end]))
    gathered = torch.full_like(whole, torch.nan)
    peers.copy_slices(of_sums, START, gathered, each, ranks)
    assert bits_of(gathered).equal(bits_of(whole))
