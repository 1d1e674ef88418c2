"""The order of routes in Triton, by counting, and the tiles of a product of routes.

A chunk of routes is counted by expert; the routes of a chunk follow those of all experts before, and of the same expert
in the chunks before. Integers alone are added, so the order of additions changes nothing. Routes without an expert
count as those of expert E, and E + 1 stands for places beyond the last route.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEP, WIDE = tl.constexpr(128), tl.constexpr(512)
"""Routes that are placed, and that are counted, at a time."""
CHUNKS = tl.constexpr(16)
"""Chunks whose counts are added at a time."""


@triton.jit
def experts_of(IDS, at, end, E):
    """Return the experts of routes; E for none, E + 1 from ``end`` on."""
    ids = tl.load(IDS + at, mask=at < end, other=0)
    known = tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)
    return tl.where(at < end, known, E + 1)


@triton.jit
def counted(IDS, first, end, E, WIDTH: tl.constexpr):
    """Return the number of routes of each expert."""
    counts = tl.zeros([WIDTH], tl.int32)
    for at in range(first, end, WIDE):
        counts += tl.histogram(experts_of(IDS, at + tl.arange(0, WIDE), end, E), WIDTH)
    return counts


@triton.jit(do_not_specialize=["routes", "chunk", "E"])
def count(IDS, COUNTS, routes, chunk, E, WIDTH: tl.constexpr):
    """Write the number of routes of each expert to COUNTS ``[chunks, WIDTH]``. Grid: chunks."""
    first = tl.program_id(0) * chunk
    counts = counted(IDS, first, tl.minimum(first + chunk, routes), E, WIDTH)
    tl.store(COUNTS + tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), counts)


@triton.jit(do_not_specialize=["routes", "chunk", "E", "size"])
def place(IDS, COUNTS, ORDER, TILES, routes, chunk, E, size, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write the routes in order, the first place of each expert, and the tiles. Grid: chunks; without COUNTS one."""
    e = tl.arange(0, WIDTH)
    here, chunks = tl.program_id(0), tl.num_programs(0)
    before = tl.zeros([WIDTH], tl.int32)
    if COUNTS is None:
        counts = counted(IDS, 0, routes, E, WIDTH)
    else:
        counts = tl.zeros([WIDTH], tl.int32)
        for group in range(0, chunks, CHUNKS):
            rows = group + tl.arange(0, CHUNKS)
            part = tl.load(COUNTS + rows[:, None] * WIDTH + e[None, :], mask=(rows < chunks)[:, None], other=0)
            counts += tl.sum(part, 0)
            before += tl.sum(tl.where((rows < here)[:, None], part, 0), 0)
    first = tl.cumsum(counts, 0) - counts
    tl.store(ORDER + routes + e, first, mask=(e <= E) & (here == 0))
    write_tiles(TILES, first, counts, size, E, BLOCK, WIDTH)
    following = first + before
    end = tl.minimum((here + 1) * chunk, routes)
    for at in range(here * chunk, end, STEP):
        row, column = at + tl.arange(0, STEP), at + tl.arange(0, STEP)
        expert, other = experts_of(IDS, row, end, E), experts_of(IDS, column, end, E)
        same = (expert[:, None] == other[None, :]) & (column[None, :] < row[:, None])
        position = tl.gather(following, expert, 0) + tl.sum(same.to(tl.int32), 1)
        tl.store(ORDER + position, row, mask=row < end)
        following += tl.histogram(expert, WIDTH)


@triton.jit
def write_tiles(TILES, first, counts, size, E, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write expert, first route, and end of the expert's, of tiles of BLOCK routes; expert E beyond the last tile.

    TILES is ``[3, size]``; the programs of a launch share the work.
    """
    e = tl.arange(0, WIDTH)
    tiles = tl.where(e < E, (counts + BLOCK - 1) // BLOCK, 0)
    ends = tl.cumsum(tiles, 0)
    for index in range(tl.program_id(0), tl.max(tiles, 0), tl.num_programs(0)):
        target, live = TILES + ends - tiles + index, tiles > index
        tl.store(target, e, mask=live)
        tl.store(target + size, first + index * BLOCK, mask=live)
        tl.store(target + 2 * size, first + counts, mask=live)
    for begin in range(tl.program_id(0) * WIDTH, size, tl.num_programs(0) * WIDTH):
        at = begin + e
        tl.store(TILES + at, tl.zeros([WIDTH], tl.int32) + E, mask=(at >= tl.sum(tiles, 0)) & (at < size))


@triton.jit(do_not_specialize=["E", "size"])
def list_tiles(BOUNDS, TILES, E, size, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write the tiles of routes whose order is known. Grid: any number of programs."""
    e = tl.arange(0, WIDTH)
    first = tl.load(BOUNDS + e, mask=e < E, other=0)
    end = tl.load(BOUNDS + e + 1, mask=e < E, other=0)
    write_tiles(TILES, first, end - first, size, E, BLOCK, WIDTH)
