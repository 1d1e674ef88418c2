"""Record the backends that are chosen and the kernels that are launched while a backend is checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from rl_kernels.core.dispatch import AUTO, record_dispatch
from rl_kernels.core.operator import arch_of
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.launched import Launched, owns, record_launches
from rl_kernels.lab.check.relations import check_relation
from rl_kernels.lab.check.result import Check, Launches, Record

UNRECORDED = ("parity",)
"""Relations that run other backends too."""


def check_relations(cell: Cell, relations: Sequence[str]) -> Iterator[Record | Launches]:
    """Check relations on a cell; yield their records, then the launches if the candidate is a backend that ran."""
    if cell.candidate.backend is None:
        for relation in relations:
            yield from check_relation(cell, relation)
        return
    backends: dict[str, None] = {}
    kernels: set[Launched] = set()
    ran = False
    for relation in relations:
        with ExitStack() as stack:
            recorded = relation not in UNRECORDED
            choices = stack.enter_context(record_dispatch(every_call=False)) if recorded else []
            launched = stack.enter_context(record_launches()) if recorded else set()
            for record in check_relation(cell, relation):
                ran = ran or (recorded and isinstance(record, Check))
                yield record
        backends |= {choice.backend: None for choice in choices if choice.operator == cell.candidate.operator.name}
        kernels |= launched
    if ran:
        yield _launches(cell, tuple(backends), kernels)


def _launches(cell: Cell, backends: tuple[str, ...], kernels: set[Launched]) -> Launches:
    candidate, device = cell.candidate, cell.setting.device
    assert candidate.backend is not None
    own = None
    if candidate.backend != AUTO:
        own = owns(candidate.operator.backend(candidate.backend), arch_of(device.type, device.index))
    own_kernels = None if own is None else tuple(sorted(map(str, filter(own, kernels))))
    all_kernels = tuple(sorted(map(str, kernels)))
    return Launches(
        candidate.operator.name, candidate.name, cell.dtype_name, cell.case.name, backends, all_kernels, own_kernels
    )
