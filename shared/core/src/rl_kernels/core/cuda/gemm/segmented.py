"""Schedules of products whose sum over K is cut into segments: tiles of the tuned table, with merges.

All schedules give the same bits. The times of merges were fitted to products of models' layers on an H100.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from rl_kernels.core.cuda.gemm.schedule import (
    BOX,
    MN_MAJOR,
    SHALLOWEST,
    Candidate,
    Schedule,
    candidates,
    operands_of,
    possible_of,
)

SEGMENTS = (2, 4, 8)
"""Numbers of segments of a product."""
CLUSTERS = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.91}
"""Blocks of a cluster, and the share of the multiprocessors that such clusters can occupy at a time."""
WHOLE = 78
"""Multiprocessors of the smallest Hopper chip; slices of one (MIG) may have no room for a cluster."""
WIDEST = 160
"""Largest width of tiles with several segments in each block of a cluster: a merge needs the registers of sums."""
FARTHEST = 1
"""Largest number of levels whose sums wait in global memory: with two, registers do not suffice."""
IN_REGISTERS, NEAR, FAR = 0.3, 2.0, 3.7
"""Microseconds of a merge of 128 x 128 sums whose left ones wait in registers, shared or global memory."""
OF_CLUSTER = 3.0, 0.5
"""Microseconds of a merge over a cluster, and additional microseconds for each of its blocks."""
ALONE = 1.0
"""Additional microseconds of a tile if no other tile is multiplied while it is stored."""
WORTH = 0.9
"""A cluster is taken if it is expected to take at most this share of the time."""
BYTES = 2.9e6
"""Bytes of a weight that are read in a microsecond: no schedule is faster, and then a cluster is slower."""


@functools.lru_cache(maxsize=4096)
def schedule_of_segments(
    m: int, n: int, k: int, majors: tuple[int, int], processors: int, segments: int, length: int
) -> Schedule:
    """Choose the schedule for ``[m, k] x [k, n]`` with this many segments of ``length`` terms of K.

    Args:
        m: rows of ``a``.
        n: columns of ``b``.
        k: terms of the sum.
        majors: the layouts of ``a`` and of ``b`` transposed, not ``PLAIN``.
        processors: multiprocessors of the GPU.
        segments: 2, 4 or 8.
        length: a multiple of 16.
    """

    def time(candidate: Candidate) -> float:
        return time_of(candidate, m, n, length, processors)

    possible = [
        candidate for candidate in possible_of(in_segments(segments), m, majors) if fits(candidate.schedule, majors)
    ]
    best = min((candidate for candidate in possible if candidate.schedule.cluster == 1), key=time)
    clusters = [candidate for candidate in possible if candidate.schedule.cluster > 1]
    if clusters and processors >= WHOLE:
        clustered = min(clusters, key=time)
        floor = 2.0 * n * k / BYTES
        best = clustered if max(time(clustered), floor) < WORTH * max(time(best), floor) else best
    return best.schedule.fitted(*operands_of(best.schedule, majors))


def fits(cut: Schedule, majors: tuple[int, int]) -> bool:
    """Say whether a schedule has room for enough stages, with ``a`` and ``b`` transposed in these layouts."""
    left, right = operands_of(cut, majors)
    # Boxes have 64 columns: of other widths the last one is padded, which takes as long to load.
    padded = right == MN_MAJOR and not cut.swapped and cut.columns % BOX
    return not padded and cut.fitted(left, right).depth(right) >= SHALLOWEST


@functools.cache
def in_segments(segments: int) -> tuple[Candidate, ...]:
    """Return all tiles of the table with this many segments, in one block or in a cluster of blocks."""
    return tuple(cut for candidate in candidates() for cut in _with_segments(candidate, segments))


def _with_segments(candidate: Candidate, segments: int) -> Iterator[Candidate]:
    # Narrow tiles fill the processors with one chain; with segments they were not measured.
    if candidate.schedule.narrow:
        return
    turns = candidate.schedule.turns
    for cluster in CLUSTERS:
        # Products of few rows are bound by loads, and gain nothing from more blocks.
        if cluster > segments or (cluster > 1 and (turns or candidate.schedule.swapped)):
            continue
        cut = replace(candidate.schedule, turns=False, segments=segments // cluster, cluster=cluster)
        if cut.far <= FARTHEST and not (1 < cluster < segments and cut.columns > WIDEST):
            yield replace(candidate, schedule=cut, tile=candidate.tile + _merge_time(cut) + (ALONE if turns else 0.0))


def time_of(candidate: Candidate, m: int, n: int, length: int, processors: int) -> float:
    """Return the expected time of a product whose segments have ``length`` terms of K, in microseconds."""
    cut = candidate.schedule
    # A block's own segments are one sum that is as long as all of them.
    inner = cut.segments * -(-length // cut.inner) * cut.inner
    return candidate.time(m, n, inner, int(processors * CLUSTERS[cut.cluster]) // cut.cluster)


def _merge_time(cut: Schedule) -> float:
    """Return the microseconds that a tile's merges take."""
    # The highest levels of a tree wait farthest, and each level has half the merges of the one below.
    far = (1 << cut.far) - 1
    near = (1 << cut.waiting) - 1 - far
    square_us = far * FAR + near * NEAR + (cut.segments - 1 - far - near) * IN_REGISTERS
    of_cluster = OF_CLUSTER[0] + OF_CLUSTER[1] * cut.cluster if cut.cluster > 1 else 0.0
    return square_us * cut.rows * cut.columns / 128**2 + of_cluster
