"""The stand-in for the kernel of ``core.cuda.gemm`` when its launches are recorded."""

from __future__ import annotations

from itertools import pairwise

import torch

from rl_kernels.core.distributed import tree_sum
from rl_kernels.core.testing.launches import Box, Launch, vector

DTYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16}
K_MAJOR, MN_MAJOR, PLAIN = 0, 1, 2


def gemm(launch: Launch, processors: int) -> None:
    """Compute the product that a launch describes, and check its arguments against the shapes."""
    constants, rows, columns = launch.constants, launch["rows"], launch["columns"]
    tiles = -(-rows // constants["TILE_M"]) * -(-columns // constants["TILE_N"])
    cluster, sums_bytes = constants["CLUSTER"], 64 * constants["TILE_N"] * 4
    assert launch.grid == (min(tiles, processors) if cluster == 1 else tiles * cluster, 1, 1)
    assert launch.block == 128 * (constants["CONSUMERS"] + 1)
    pieces = -(-constants["TILE_N"] // 64) * 64 if constants["B_MAJOR"] == MN_MAJOR else constants["TILE_N"]
    stages = constants["STAGES"] * constants["BOXES"] * (constants["TILE_M"] + pieces) * 128
    leaving = constants["CONSUMERS"] * max(2 * 64 * 128 if constants["STORED"] else 0, constants["NEAR"] * sums_bytes)
    # Registers hold the sums of one segment and the partial sums of earlier ones.
    levels = constants["SEGMENTS"].bit_length() - 1 - constants["NEAR"] - constants["FAR"]
    assert (levels + 1) * constants["TILE_N"] // 2 <= 192
    if constants["FAR"]:
        assert launch["scratch"].numel() >= constants["FAR"] * constants["CONSUMERS"] * sums_bytes * launch.grid[0]
    if constants["SEGMENTS"] * cluster > 1:
        assert not constants["CONTINUES"]
        assert PLAIN not in (constants["A_MAJOR"], constants["B_MAJOR"])
        assert constants["CONSUMERS"] == max(constants["TILE_M"] // 64, 1)
    if cluster > 1:
        assert constants["STORED"] == constants["A_ONCE"] == 0
        assert constants["TILE_M"] % 64 == 0
        assert constants["TILE_M"] * (constants["TILE_N"] + 8) * 4 <= stages
    # The instruction reads 64 rows of every tile.
    assert launch.shared >= stages + max(leaving, (64 - constants["TILE_M"]) * 128) + 1024
    assert constants["STAGES"] >= 3
    assert launch["group"] > 0
    assert not constants["A_ONCE"] or columns <= constants["TILE_N"]
    assert launch.pdl == (bool(constants["A_ONCE"]) or (cluster > 1 and constants["TILE_N"] > 128))
    out = _output(launch)
    sums = product(
        _operand(launch, "a", rows),
        _operand(launch, "b", columns).t(),
        constants["SEGMENTS"] * cluster,
        launch["length"],
    )
    if constants["CONTINUES"]:
        assert out.dtype == torch.float32
        sums += out
    if launch["bias_along"]:
        bias = vector(launch["bias"], rows if launch["bias_along"] == 1 else columns).double()
        assert launch["bias"].dtype == DTYPES[constants["DTYPE"]]
        sums += (bias[:, None] if launch["bias_along"] == 1 else bias).to(sums.dtype)
    out.copy_(sums)


def _operand(launch: Launch, name: str, rows: int) -> torch.Tensor:
    """Return an operand ``[rows, inner]`` as the kernel reads it."""
    major, tile = launch.constants[f"{name.upper()}_MAJOR"], launch.constants["TILE_M" if name == "a" else "TILE_N"]
    described, base, shape = launch[f"map_{name}"], launch[name], (rows, launch["inner"])
    if major == PLAIN:
        assert described == bytes(128)
        assert launch.constants["BOXES"] == 1
        value = base.as_strided(shape, (launch[f"{name}_row"], launch[f"{name}_inner"]), base.storage_offset())
    else:
        assert described.box == ((tile, 64) if major == K_MAJOR else (64, 64))
        assert described.swizzle == 128
        # The cache may drop a row once a tile has read it: no other tile may need it.
        assert described.promotion == (128 if name == "a" and launch.constants["A_ONCE"] else 256)
        value = described.tensor if major == K_MAJOR else described.tensor.t()
    assert value.shape == shape
    assert value.dtype == DTYPES[launch.constants["DTYPE"]]
    return value


def _output(launch: Launch) -> torch.Tensor:
    stored, out, shape = launch.constants["STORED"], launch["out"], (launch["rows"], launch["columns"])
    assert out.dtype == DTYPES[launch.constants["OUT"]]
    described = launch["map_out"]
    if stored == 0:
        assert described == bytes(128)
        return out.as_strided(shape, (launch["out_row"], launch["out_column"]), out.storage_offset())
    assert isinstance(described, Box)
    height, width = described.box
    assert launch.constants["TILE_M"] % 64 == 0
    if stored == 1:
        assert (height, width * out.itemsize) == (64, described.swizzle)
        assert launch.constants["TILE_N"] % width == 0
    else:
        assert (width, described.swizzle, out.itemsize) == (64, 128, 2)
        assert launch.constants["TILE_N"] % height == 0
    value = described.tensor if stored == 1 else described.tensor.t()
    assert value.shape == shape
    return value


def product(a: torch.Tensor, b: torch.Tensor, segments: int, length: int) -> torch.Tensor:
    """Return ``a @ b``; with several segments, the tree of their sums in FP32."""
    if segments == 1:
        return a.double() @ b.double()
    ends = [min(number * length, a.shape[1]) for number in range(segments + 1)]
    parts = [(a[:, first:end].double() @ b[first:end].double()).float() for first, end in pairwise(ends)]
    return tree_sum(parts)
