"""The launches of a plan: kernels of a pass, their grids and their scalar arguments."""

from __future__ import annotations

from typing import NamedTuple

from rl_kernels.core.cuda.launch import Kernel


class Forward(NamedTuple):
    """The launches of a forward pass.

    Attributes:
        attend: the kernel that computes tiles.
        grid: thread blocks of ``attend``.
        threads: threads of a thread block.
        shared: bytes of shared memory of a thread block.
        finish: the kernel that merges states, or None.
        finish_grid: grid of ``finish``.
        states: number of FP32 values that ``attend`` writes for ``finish``.
        shape: numbers of ``struct Shape`` after its integer tensors.
        strides: strides of q between sequences, queries and heads.
        claims: whether thread blocks claim tiles from a counter.
        numbers: members of ``struct Args`` after the counter.
    """

    attend: Kernel
    grid: int
    threads: int
    shared: int
    finish: Kernel | None
    finish_grid: tuple[int, int, int]
    states: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    claims: bool
    numbers: tuple[float, ...]


class Backward(NamedTuple):
    """The launches of a backward pass.

    Attributes:
        rows: the kernel of lse and delta of each row.
        rows_grid: thread blocks of ``rows``.
        sizes: scalar arguments of ``rows``.
        queries: the kernel of dq.
        queries_grid: thread blocks of ``queries``.
        keys: the kernel of dk and dv.
        keys_grid: thread blocks of ``keys``; 0 if there is no key.
        threads: threads of a thread block of ``queries`` and ``keys``.
        shared: bytes of shared memory of such a thread block.
        shapes: numbers of ``struct Shape`` for dq, and for dk and dv.
        strides: strides of q between sequences, queries and heads.
        numbers: members of ``struct Args`` after the counter, for dq, and for dk and dv.
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
