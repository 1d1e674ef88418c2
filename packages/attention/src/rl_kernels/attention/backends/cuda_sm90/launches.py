"""What a plan holds: the kernels of a pass, their grids and their numbers."""

from __future__ import annotations

from typing import NamedTuple

from rl_kernels.core.cuda.launch import Kernel


class Forward(NamedTuple):
    """The launches of a forward pass.

    Attributes:
        attend: the kernel of tiles.
        grid: its thread blocks.
        threads: threads of each.
        shared: bytes of shared memory of each.
        finish: the kernel that merges states, or None.
        merging: its thread blocks.
        states: numbers of the states that ``attend`` writes for ``finish``.
        shape: the numbers of ``struct Shape``, which follow its integer tensors.
        strides: of q between sequences, queries and heads.
        draws: whether tiles are drawn from a counter.
        numbers: what follows it in ``struct Args``.
    """

    attend: Kernel
    grid: int
    threads: int
    shared: int
    finish: Kernel | None
    merging: tuple[int, int, int]
    states: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    draws: bool
    numbers: tuple[float, ...]


class Backward(NamedTuple):
    """The launches of a backward pass.

    Attributes:
        rows: the kernel of what each row needs.
        rows_grid: its thread blocks.
        sizes: its numbers.
        queries: the kernel of dq.
        queries_grid: its thread blocks.
        keys: the kernel of dk and dv.
        keys_grid: its thread blocks; 0 if there is no key.
        threads: threads of a thread block of the last two kernels.
        shared: its bytes of shared memory.
        shapes: the numbers of ``struct Shape`` for dq, and for dk and dv.
        strides: of q.
        numbers: what follows the counter in ``struct Args``, for dq, and for dk and dv.
    """

    rows: Kernel
    rows_grid: int
    sizes: tuple[int, ...]
    queries: Kernel
    queries_grid: int
    keys: Kernel
    keys_grid: int
    threads: int
    shared: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    strides: tuple[int, ...]
    numbers: tuple[tuple[float, ...], tuple[float, ...]]
