"""The order of routes in Triton, by counting, and the tiles of a product of routes.

The routes of a block follow those of all experts before, and of the same expert in the blocks before. Few routes are
counted by each block itself; else ``count`` counts the routes of each expert in a block, and ``add_up`` adds the blocks
before. Integers alone are added, so the order of additions changes nothing. Routes without an expert count as those of
expert E, and E + 1 stands for places beyond the last route.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_OF_ROUTES, PART = tl.constexpr(128), tl.constexpr(32)
"""Routes of a block, and those that each of them is compared with at a time."""
WIDE = tl.constexpr(512)
"""Routes that are counted at a time, where no block was counted before."""
ROWS, COLUMNS = tl.constexpr(2048), tl.constexpr(4)
"""Blocks and experts whose counts are added at a time."""
LISTING = tl.constexpr(32)
"""Largest number of programs that list tiles."""


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


@triton.jit(do_not_specialize=["routes", "E"])
def count(IDS, COUNTS, routes, E, WIDTH: tl.constexpr):
    """Write the number of routes of each expert in each block to COUNTS ``[blocks + 1, WIDTH]``. Grid: blocks."""
    at = tl.program_id(0) * BLOCK_OF_ROUTES + tl.arange(0, BLOCK_OF_ROUTES)
    counts = tl.histogram(experts_of(IDS, at, routes, E), WIDTH)
    tl.store(COUNTS + tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), counts)


@triton.jit(do_not_specialize=["blocks"])
def add_up(COUNTS, blocks, WIDTH: tl.constexpr):
    """Replace the counts of each block by the sums of those before; the last row becomes all of them. Grid: columns."""
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, blocks, ROWS):
        rows = first + tl.arange(0, ROWS)
        place = COUNTS + rows[:, None] * WIDTH + e[None, :]
        counts = tl.load(place, mask=(rows < blocks)[:, None], other=0)
        tl.store(place, total[None, :] + tl.cumsum(counts, 0) - counts, mask=(rows < blocks)[:, None])
        total += tl.sum(counts, 0)
    tl.store(COUNTS + blocks * WIDTH + e, total)


@triton.jit(do_not_specialize=["routes", "E", "size"])
def place(IDS, COUNTS, ORDER, TILES, routes, E, size, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write the routes in order, the first place of each expert, and the tiles. Grid: blocks, at least one.

    COUNTS are those of ``add_up``, or None.
    """
    e = tl.arange(0, WIDTH)
    here, begin = tl.program_id(0), tl.program_id(0) * BLOCK_OF_ROUTES
    if COUNTS is None:
        before = counted(IDS, 0, begin, E, WIDTH)
        counts = before + counted(IDS, begin, routes, E, WIDTH)
    else:
        before = tl.load(COUNTS + here * WIDTH + e)
        counts = tl.load(COUNTS + tl.num_programs(0) * WIDTH + e)
    first = tl.cumsum(counts, 0) - counts
    if here == 0:
        tl.store(ORDER + routes + e, first, mask=e <= E)
    parts = tl.minimum(tl.num_programs(0), LISTING)
    if here < parts:
        write_tiles(TILES, first, counts, size, E, here, parts, BLOCK, WIDTH)
    row = begin + tl.arange(0, BLOCK_OF_ROUTES)
    expert = experts_of(IDS, row, routes, E)
    same = tl.zeros([BLOCK_OF_ROUTES, PART], tl.int32)
    for part in tl.static_range(0, BLOCK_OF_ROUTES, PART):
        column = begin + part + tl.arange(0, PART)
        other = experts_of(IDS, column, routes, E)
        same += ((expert[:, None] == other[None, :]) & (column[None, :] < row[:, None])).to(tl.int32)
    position = tl.gather(first + before, expert, 0) + tl.sum(same, 1)
    tl.store(ORDER + position, row, mask=row < routes)


@triton.jit
def write_tiles(TILES, first, counts, size, E, part, parts, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write expert, first route, and end of the expert's, of tiles of BLOCK routes; expert E beyond the last tile.

    TILES is ``[3, size]``; this is one of ``parts`` programs that share the work.
    """
    e = tl.arange(0, WIDTH)
    tiles = tl.where(e < E, (counts + BLOCK - 1) // BLOCK, 0)
    ends = tl.cumsum(tiles, 0)
    for index in range(part, tl.max(tiles, 0), parts):
        target, live = TILES + ends - tiles + index, tiles > index
        tl.store(target, e, mask=live)
        tl.store(target + size, first + index * BLOCK, mask=live)
        tl.store(target + 2 * size, first + counts, mask=live)
    for begin in range(part * WIDTH, size, parts * WIDTH):
        at = begin + e
        tl.store(TILES + at, tl.zeros([WIDTH], tl.int32) + E, mask=(at >= tl.sum(tiles, 0)) & (at < size))


@triton.jit(do_not_specialize=["E", "size"])
def list_tiles(BOUNDS, TILES, E, size, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write the tiles of routes whose order is known. Grid: any number of programs."""
    e = tl.arange(0, WIDTH)
    first = tl.load(BOUNDS + e, mask=e < E, other=0)
    end = tl.load(BOUNDS + e + 1, mask=e < E, other=0)
    write_tiles(TILES, first, end - first, size, E, tl.program_id(0), tl.num_programs(0), BLOCK, WIDTH)
