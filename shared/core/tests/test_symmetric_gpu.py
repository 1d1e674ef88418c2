"""Sums through symmetric memory have the bits of collectives; calls of all sizes may follow each other."""

import pytest
import torch
from torch import distributed

from rl_kernels.core.distributed import all_gather, all_reduce, reduce_product, reduce_scatter, symmetric, tree_sum
from rl_kernels.core.testing import bits_of
from rl_kernels.core.testing.ranks import run_ranks

pytestmark = pytest.mark.gpu
SHAPES = [(1, 5), (7, 4096), (32, 3000), (1024, 1025), (2048, 4096), (6, 3), (4098, 1000), (4096, 1536)]


def written(x):
    def write(part, first, end):
        part.copy_(x.view(-1, x.shape[-1])[first:end])

    return write


def sums(rank):
    group, failed = distributed.group.WORLD, []
    world = distributed.get_world_size()

    def same(name, found, wanted):
        if found.shape != wanted.shape or not bits_of(found).equal(bits_of(wanted)):
            failed.append(name)

    for turn in range(3):
        for shape in SHAPES:
            generator = torch.Generator("cuda").manual_seed(turn)
            bias = torch.randn(shape[-1], generator=generator, device="cuda").bfloat16()
            generator.manual_seed(100 * turn + rank)
            x = torch.randn(shape, generator=generator, device="cuda")
            wanted = (tree_sum(all_gather(x[None], group)) + bias.float()).bfloat16()
            # The first use of memory may be a rollout's.
            with torch.inference_mode(turn == 0):
                if symmetric.window_of(group, x, x.nbytes) is None:
                    failed.append("no symmetric memory")
                same(("all-reduce", shape), all_reduce(x, group, bias=bias, dtype=torch.bfloat16), wanted)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = all_reduce(x, group, bias=bias, dtype=torch.bfloat16)
            for _ in range(3):
                graph.replay()
            same(("graph", shape), found, wanted)
            options = {"bias": bias, "dtype": torch.bfloat16}
            same(("product", shape), reduce_product(written(x), shape, x, group, **options), wanted)
            if shape[0] % world == 0:
                mine = wanted.chunk(world)[rank]
                same(("reduce-scatter", shape), reduce_scatter(x, group, **options), mine)
                found = reduce_product(written(x), shape, x, group, scatter_dim=0, **options)
                same(("scattered product", shape), found, mine)
                single = (1, *shape)
                found = reduce_product(written(x), single, x, group, scatter_dim=1, **options)
                same(("scattered product, dim 1", shape), found, mine[None])
    return failed


@pytest.mark.parametrize("world", [2, 4, 8])
def test_gpus(world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    assert run_ranks(sums, world, backend="nccl", timeout=120.0) == [[]] * world
