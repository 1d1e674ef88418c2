"""Schedules of ``gemm_sm90.cu`` on a Hopper GPU, from a fixed table: nothing is timed at run time.

All schedules give the same bits, so the choice may depend on all sizes: it takes the least expected time.
``tuned/h200.json`` holds the speed of each. ``tools/tune_matmul.py`` measured most of them; schedules for 33 to 64
rows were measured before their launches were dependent. Schedules of 64 x 32, 64 x 64, 64 x 128 and 128 x 80 tiles,
and for up to 32 rows, were fitted to products of models' layers, timed alternately as with ``--beside``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from rl_kernels.core.tuned import entry

K_MAJOR, MN_MAJOR, PLAIN = 0, 1, 2
"""Layout of an operand ``[rows, K]``: K contiguous, rows contiguous, or neither."""
ROWS, BOX, HALF, FLOAT, SWIZZLE = 64, 64, 2, 4, 128
"""Rows of a warpgroup, terms of K in a box, bytes of a 16-bit number, of an FP32 number, of a swizzled row."""
ROOM = 227 * 1024 - 2048
"""Bytes of shared memory for stages and epilogue: the limit of a block, less barriers and alignment."""
BOXES = 2 * ROWS * SWIZZLE
"""Bytes of the two boxes of one consumer."""
DEEPEST = 24
"""Largest number of stages."""
SHALLOWEST = 3
"""Smallest number of stages of a schedule with segments; sums in shared memory leave room for as many."""
SMALL = 64 * 128
"""Tiles with up to this many numbers take longer to load than to multiply, as measured."""
SUMS = 192
"""Registers of a thread for the sums of a segment, and for the sums that wait for a merge with it."""
PLAIN_COLUMNS = 128
"""Largest number of columns of a tile whose operand is read number by number, which needs registers."""


@dataclass(frozen=True)
class Schedule:
    """The tiling of a product ``[M, K] x [K, N]``.

    Attributes:
        rows: rows of a tile; fewer than 64 only if K is contiguous in the left operand of a tile.
        columns: columns of a tile.
        inner: terms of K in a stage, a multiple of 64.
        turns: ping-pong: of two tiles of 64 rows, one is multiplied while the other is stored.
        group: rows of tiles that are processed together.
        swapped: for products of few rows. A tile's rows are columns of the right operand, and its columns are all rows
            of the left one, so each part of the right operand is read by one tile only. Blocks start while the kernel
            before still runs, which hides their work before the first stage.
        segments: segments of K that a block multiplies one after the other, each a chain from 0.
        cluster: blocks that share a tile, each with ``segments`` segments of its own.
    """

    rows: int
    columns: int
    inner: int = BOX
    turns: bool = False
    group: int = 8
    swapped: bool = False
    segments: int = 1
    cluster: int = 1

    @property
    def consumers(self) -> int:
        """Return the number of consumer warpgroups."""
        return 2 if self.turns else max(self.rows // ROWS, 1)

    @property
    def in_boxes(self) -> bool:
        """Say whether TMA can store tiles: rows of whole warpgroups, columns in pairs of 8 x 8 matrices.

        Of a tile that blocks share, each stores a part.
        """
        return self.rows >= ROWS and self.columns % 16 == 0 and self.cluster == 1

    @property
    def narrow(self) -> bool:
        """Say whether so few columns are no whole boxes that padding them would be much of what is loaded."""
        return self.columns < PLAIN_COLUMNS and self.columns % BOX > 0 and not self.swapped

    @property
    def early(self) -> bool:
        """Say whether blocks may start while the kernel before still runs; as measured, not in other clusters."""
        return self.swapped or (self.cluster > 1 and self.columns > PLAIN_COLUMNS)

    @property
    def waiting(self) -> int:
        """Return the number of levels of the tree of a block's segments whose left sums do not fit in registers."""
        return max(self.segments.bit_length() - SUMS // (self.columns // 2), 0)

    @property
    def near(self) -> int:
        """Return the number of levels whose left sums wait in shared memory: as many as leave room for stages."""
        room = (ROOM - SHALLOWEST * self.stage_bytes(K_MAJOR)) // self.consumers
        return min(self.waiting, max(room, 0) // self.sums)

    @property
    def far(self) -> int:
        """Return the number of levels whose left sums wait in global memory."""
        return self.waiting - self.near

    @property
    def sums(self) -> int:
        """Return the bytes of a consumer's sums."""
        return ROWS * self.columns * FLOAT

    @property
    def behind(self) -> int:
        """Return the bytes after the stages: boxes, sums that wait, or rows beyond a tile of few rows that it reads."""
        of_consumer = max(BOXES if self.in_boxes else 0, self.near * self.sums)
        return max(self.consumers * of_consumer, (ROWS - self.rows) * SWIZZLE)

    @property
    def bound_by_loads(self) -> bool:
        """Say whether its tiles are bound by loading their operands, not by multiplying them."""
        return self.swapped or self.rows * self.columns <= SMALL

    def stage_bytes(self, right: int) -> int:
        """Return the bytes of a stage; ``right`` is the layout of a tile's right operand."""
        columns = -(-self.columns // BOX) * BOX if right == MN_MAJOR else self.columns
        return (self.rows + columns) * self.inner * HALF

    def depth(self, right: int) -> int:
        """Return the number of stages: as many as fit."""
        return min((ROOM - self.behind) // self.stage_bytes(right), DEEPEST)

    def shared(self, right: int) -> int:
        """Return the bytes of dynamic shared memory of a block."""
        return self.depth(right) * self.stage_bytes(right) + self.behind + 1024

    def units(self, rows: int, columns: int) -> int:
        """Return the number of tiles of a product of ``rows`` by ``columns``."""
        return -(-rows // self.rows) * -(-columns // self.columns)

    def fitted(self, left: int, right: int) -> Schedule:
        """Return this schedule, adapted to the layouts of a tile's operands."""
        cut = self
        if PLAIN in (left, right):
            rows, columns = max(cut.rows, ROWS), min(cut.columns, PLAIN_COLUMNS)
            cut = replace(cut, rows=rows, columns=columns, inner=BOX, turns=False)
        if left == MN_MAJOR and cut.rows < ROWS:
            cut = replace(cut, rows=ROWS)
        # Boxes have 64 columns: tiles of other widths pad the last one, which leaves no room for long stages.
        if right == MN_MAJOR and cut.narrow:
            cut = replace(cut, columns=-(-cut.columns // BOX) * BOX)
        return replace(cut, inner=BOX) if right == MN_MAJOR and cut.columns % BOX else cut


FEW = 64
"""Largest number of rows of a product whose right operand, not the left one, is streamed."""


@dataclass(frozen=True)
class Candidate:
    """A schedule and its cost on the device that it was tuned on, in microseconds.

    Attributes:
        schedule: the schedule.
        start: cost of a product, without its tiles.
        tile: cost of a tile, without its stages.
        stage: cost of a stage if all multiprocessors work.
        alone: cost of a stage if few multiprocessors work: its latency.
        continued: additional cost of a tile if the chain continues from an FP32 output.
    """

    schedule: Schedule
    start: float
    tile: float
    stage: float
    alone: float
    continued: float

    def time(self, m: int, n: int, k: int, processors: int, continues: bool = False) -> float:
        """Return the expected time of a product on ``processors`` multiprocessors, in microseconds."""
        cut = self.schedule
        rows, columns = (n, m) if cut.swapped else (m, n)
        rounds, remaining = divmod(cut.units(rows, columns), processors)
        tile, stage = self.tile + (self.continued if continues else 0.0), max(self.alone, self.stage)
        # In the last round fewer tiles load, so the operands of each arrive sooner.
        last = max(self.alone, self.stage * remaining / processors) if cut.bound_by_loads else stage
        stages = -(-k // cut.inner) * (rounds * stage + (last if remaining else 0.0))
        return self.start + (rounds + bool(remaining)) * tile + stages


@functools.lru_cache(maxsize=4096)
def schedule_for(m: int, n: int, k: int, majors: tuple[int, int], processors: int, continues: bool = False) -> Schedule:
    """Choose the schedule for ``[m, k] x [k, n]``; ``majors`` are the layouts of ``a`` and of ``b`` transposed."""
    possible = possible_of(candidates(), m, majors)
    best = min(possible, key=lambda candidate: candidate.time(m, n, k, processors, continues))
    return best.schedule.fitted(*operands_of(best.schedule, majors))


def possible_of(known: tuple[Candidate, ...], m: int, majors: tuple[int, int]) -> list[Candidate]:
    """Return the candidates for products of ``m`` rows and operands with these layouts."""
    fitting = [candidate for candidate in known if candidate.schedule.swapped == (m <= FEW)]
    # One tile must hold every row, or the weights would be read twice.
    fitting = [candidate for candidate in fitting if not candidate.schedule.swapped or candidate.schedule.columns >= m]
    # One row of tiles reads the weights from memory, once: narrow tiles were no faster there.
    fitting = [candidate for candidate in fitting if not candidate.schedule.narrow or m > candidate.schedule.rows]
    possible = [
        candidate
        for candidate in fitting
        if candidate.schedule.fitted(*operands_of(candidate.schedule, majors)) == candidate.schedule
    ] or fitting
    if m <= FEW:
        # But no wider than needed: columns beyond the matrix cost as much as its own columns.
        width = min(candidate.schedule.columns for candidate in possible)
        possible = [candidate for candidate in possible if candidate.schedule.columns == width]
    return possible


def operands_of(cut: Schedule, majors: tuple[int, int]) -> tuple[int, int]:
    """Return the layouts of a tile's left and right operand."""
    return majors[::-1] if cut.swapped else majors


@functools.cache
def candidates() -> tuple[Candidate, ...]:
    """Return all schedules with their measured speeds."""
    return entry("rl_kernels.core.cuda.gemm", "matmul", kind=tuple[Candidate, ...])
