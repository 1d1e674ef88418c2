"""The stand-in for the kernel of ``core.triton_lib.gemm_kernels`` when its launches are recorded."""

from __future__ import annotations

import torch

from rl_kernels.core.testing.triton_launches import Descriptor, TritonLaunch

SHARED = 227 << 10
"""Bytes of shared memory that a block may have on Hopper."""
BY_ROW, BY_COLUMN = 1, 2


def matmul(launch: TritonLaunch, processors: int = 2) -> None:
    """Compute the product that a launch describes, and check its arguments against the shapes."""
    rows, columns, inner = launch["M"], launch["N"], launch["K"]
    left = operand(launch["a"], launch["LEFT"], (rows, inner), "a", launch, launch["BLOCK_M"])
    right = operand(launch["b"], launch["RIGHT"], (columns, inner), "b", launch, launch["BLOCK_N"])
    out = _output(launch)
    tiles = -(-rows // launch["BLOCK_M"]) * -(-columns // launch["BLOCK_N"])
    assert launch.grid[0] == (min(tiles, processors) if launch["PERSISTENT"] else tiles)
    assert launch["BLOCK_K"] % 16 == launch["SPAN"] % 16 == 0
    if left.dtype == torch.float32:
        assert launch["BLOCK_K"] == 16, "FP32 operands are loaded one step at a time"
    else:
        assert launch["SPAN"] == 16
    _check_room(launch, left.itemsize, out)

    total = left.double() @ right.double().t()
    if launch["CONTINUES"]:
        assert out.dtype == torch.float32
        total += out
    if launch["BIAS"]:
        size = rows if launch["BIAS"] == BY_ROW else columns
        bias = launch["bias"].as_strided((size,), (launch["bias_stride"],), launch["bias"].storage_offset()).double()
        total += bias[:, None] if launch["BIAS"] == BY_ROW else bias
    out.copy_(total)


def operand(
    source: torch.Tensor | Descriptor, kind: int, shape: tuple[int, int], name: str, launch: TritonLaunch, block: int
) -> torch.Tensor:
    """Return an operand ``[rows, K]`` as a kernel reads it."""
    boxes = [[block, launch["BLOCK_K"]], [launch["BLOCK_K"], block]]
    if isinstance(source, Descriptor):
        value = source.value if kind == 0 else source.value.t()
        assert source.block_shape == boxes[kind], f"{name} comes in boxes of {source.block_shape}"
        assert value.shape == shape, f"{name} is {tuple(value.shape)}, expected {shape}"
        return value
    assert kind == 2, f"{name} has no descriptor"
    rows = {"a": "a_row_stride", "b": "b_row_stride", "hidden": "hidden_row", "weight": "weight_row"}[name]
    inner = rows.replace("row", "k")
    return source.as_strided(shape, (launch[rows], launch[inner]), source.storage_offset())


def _output(launch: TritonLaunch) -> torch.Tensor:
    c, shape = launch["c"], (launch["M"], launch["N"])
    if not launch["STORED"]:
        strides = launch["c_row_stride"], launch["c_column_stride"]
        assert isinstance(c, torch.Tensor)
        return c.as_strided(shape, strides, c.storage_offset())
    assert isinstance(c, Descriptor)
    assert tuple(c.shape) == shape
    assert c.block_shape == [launch["BLOCK_M"], launch["BLOCK_N"] // launch["PARTS"]]
    return c.value


def _check_room(launch: TritonLaunch, size: int, out: torch.Tensor) -> None:
    """Check that the loads in flight fit into shared memory, with a tile's store next to the loads of the next tile."""
    loads = (launch["BLOCK_M"] + launch["BLOCK_N"]) * launch["BLOCK_K"] * size * launch.options["num_stages"]
    stored = launch["BLOCK_M"] * launch["BLOCK_N"] // launch["PARTS"] * out.itemsize if launch["PERSISTENT"] else 0
    assert loads + stored <= SHARED
