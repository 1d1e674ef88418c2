"""How a product is laid out on a Hopper GPU by ``kernels/det_gemm_sm90.cu``: frozen, nothing is timed at run time.

Any schedule gives the same bits, so the choice may follow all sizes: the one that is expected to take least time.
``tuned/h200.json`` holds the speed of each. Most are as ``tools/tune_matmul.py`` measured them, those for 33 to 64 rows
before their launches were dependent. Those of 64 x 64 and 64 x 128 and those for up to 32 rows were fitted to products
of models' layers, timed in turn as by ``--beside``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from rl_kernels.core.tuned import entry

K_MAJOR, MN_MAJOR, PLAIN = 0, 1, 2
"""How an operand ``[rows, K]`` lies: terms of K side by side, rows side by side, any other way."""
ROWS, BOX, HALF, SWIZZLE = 64, 64, 2, 128
"""Rows of a warpgroup, terms of K in a box, bytes of a 16-bit number, of a swizzled row."""
ROOM = 227 * 1024 - 2048
"""Bytes of shared memory for stages and what follows them: what a block may have, less barriers and alignment."""
BOXES = 2 * ROWS * SWIZZLE
"""Bytes of the two boxes of a consumer."""
DEEPEST = 24
"""Stages at most."""
SMALL = 64 * 128
"""Numbers of a tile up to which, as measured, its operands take longer to come than to be multiplied."""
PLAIN_COLUMNS = 128
"""Columns of a tile at most where registers are needed for reading an operand number by number."""


@dataclass(frozen=True)
class Schedule:
    """How a product ``[M, K] x [K, N]`` is cut.

    Attributes:
        rows: of a tile; less than 64 where the left operand of a tile lies with its terms of K side by side.
        columns: of a tile.
        inner: terms of K in a stage, a multiple of 64.
        turns: two tiles of 64 rows at a time, of which one is multiplied while the other is stored.
        group: rows of tiles that are worked on together.
        swapped: a tile's rows are columns of the right operand, and its columns all rows of the left one, for a product
            of few: what it reads of the right operand no other tile does. Its blocks begin while the kernel before
            still runs, which hides what they do before their first stage.
    """

    rows: int
    columns: int
    inner: int = BOX
    turns: bool = False
    group: int = 8
    swapped: bool = False

    @property
    def consumers(self) -> int:
        """Return the number of consumer warpgroups."""
        return 2 if self.turns else max(self.rows // ROWS, 1)

    @property
    def in_boxes(self) -> bool:
        """Say whether tiles can be stored in boxes: whole warpgroups' rows, pairs of 8 x 8 matrices."""
        return self.rows >= ROWS and self.columns % 16 == 0

    @property
    def behind(self) -> int:
        """Return the bytes that follow the stages: boxes, or what a tile of less than 64 rows reads beyond its own."""
        return self.consumers * BOXES if self.in_boxes else max(ROWS - self.rows, 0) * SWIZZLE

    @property
    def bound_by_loads(self) -> bool:
        """Say whether its tiles take the time in which their operands come, and not that of their products."""
        return self.swapped or self.rows * self.columns <= SMALL

    def stage_bytes(self, right: int) -> int:
        """Return the bytes of a stage; ``right`` says how the right operand of a tile lies."""
        columns = -(-self.columns // BOX) * BOX if right == MN_MAJOR else self.columns
        return (self.rows + columns) * self.inner * HALF

    def depth(self, right: int) -> int:
        """Return the number of stages: as many as there is room for."""
        return min((ROOM - self.behind) // self.stage_bytes(right), DEEPEST)

    def shared(self, right: int) -> int:
        """Return the bytes of dynamic shared memory of a block."""
        return self.depth(right) * self.stage_bytes(right) + self.behind + 1024

    def units(self, rows: int, columns: int) -> int:
        """Return how many tiles a product of so many rows and columns has."""
        return -(-rows // self.rows) * -(-columns // self.columns)

    def fitted(self, left: int, right: int) -> Schedule:
        """Return what of it is possible where the operands of a tile lie like this."""
        cut = self
        if PLAIN in (left, right):
            rows, columns = max(cut.rows, ROWS), min(cut.columns, PLAIN_COLUMNS)
            cut = replace(cut, rows=rows, columns=columns, inner=BOX, turns=False)
        if left == MN_MAJOR and cut.rows < ROWS:
            cut = replace(cut, rows=ROWS)
        # Pieces are of 64 columns: tiles of other widths pad the last one, which leaves no room for long stages.
        return replace(cut, inner=BOX) if right == MN_MAJOR and cut.columns % BOX else cut


FEW = 64
"""Rows up to which the right operand is what is streamed."""


@dataclass(frozen=True)
class Candidate:
    """A schedule and its speed on the device that it was tuned on, in microseconds.

    Attributes:
        schedule: what it is the speed of.
        start: what a product takes beside its tiles.
        tile: what a tile takes beside its stages.
        stage: a stage with every multiprocessor at work.
        alone: a stage with few of them at work: its latency.
        continued: what a tile takes more whose chain goes on from an FP32 output.
    """

    schedule: Schedule
    start: float
    tile: float
    stage: float
    alone: float
    continued: float

    def time(self, m: int, n: int, k: int, processors: int, continues: bool = False) -> float:
        """Return the microseconds that a product is expected to take on so many multiprocessors."""
        cut = self.schedule
        rows, columns = (n, m) if cut.swapped else (m, n)
        rounds, rest = divmod(cut.units(rows, columns), processors)
        tile, stage = self.tile + (self.continued if continues else 0.0), max(self.alone, self.stage)
        # In the last round: the fewer tiles load, the sooner the operands of each come.
        last = max(self.alone, self.stage * rest / processors) if cut.bound_by_loads else stage
        stages = -(-k // cut.inner) * (rounds * stage + (last if rest else 0.0))
        return self.start + (rounds + bool(rest)) * tile + stages


@functools.lru_cache(maxsize=4096)
def schedule_for(m: int, n: int, k: int, majors: tuple[int, int], processors: int, continues: bool = False) -> Schedule:
    """Return the schedule for a product ``[m, k] x [k, n]``; ``majors`` says how ``a`` and ``b`` transposed lie."""

    def operands(candidate: Candidate) -> tuple[int, int]:
        return majors[::-1] if candidate.schedule.swapped else majors

    fitting = [one for one in candidates() if one.schedule.swapped == (m <= FEW)]
    # Every row at once, or the weights would be read again.
    fitting = [one for one in fitting if not one.schedule.swapped or one.schedule.columns >= m]
    possible = [one for one in fitting if one.schedule.fitted(*operands(one)) == one.schedule] or fitting
    if m <= FEW:
        # And no more columns than that takes: those beyond the matrix cost as much as others.
        width = min(one.schedule.columns for one in possible)
        possible = [one for one in possible if one.schedule.columns == width]
    best = min(possible, key=lambda one: one.time(m, n, k, processors, continues))
    return best.schedule.fitted(*operands(best))


@functools.cache
def candidates() -> tuple[Candidate, ...]:
    """Return all schedules with their measured speeds."""
    return entry("rl_kernels.det_gemm.backends.cuda_sm90", "cuda", kind=tuple[Candidate, ...])
