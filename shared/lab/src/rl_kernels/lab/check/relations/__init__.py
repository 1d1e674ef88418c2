"""The relations by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from traceback import format_exc

import torch

from rl_kernels.core.contract import MissingTolerance
from rl_kernels.core.dispatch import BackendUnavailable, without_canaries
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.guard import Misbehaved
from rl_kernels.lab.check.relations.accuracy import accuracy, gradients
from rl_kernels.lab.check.relations.determinism import invariance, repeatability
from rl_kernels.lab.check.relations.hygiene import hygiene
from rl_kernels.lab.check.relations.integration import integration
from rl_kernels.lab.check.relations.parity import parity
from rl_kernels.lab.check.relations.robustness import robustness
from rl_kernels.lab.check.result import Record

RELATIONS: dict[str, Callable[[Cell], Iterator[Record]]] = {
    "accuracy": accuracy,
    "gradients": gradients,
    "repeatability": repeatability,
    "invariance": invariance,
    "parity": parity,
    "robustness": robustness,
    "hygiene": hygiene,
    "torch": integration,
}
"""Relation -> function from a cell to records. A candidate that misbehaves gives a failed check; the run continues."""


def check_relation(cell: Cell, relation: str) -> Iterator[Record]:
    """Check a relation on a cell; yield its records, or the reason for skipping it."""
    if not concerns(cell, relation):
        return
    device = cell.setting.device
    # Seed torch's global generator, so that a candidate that draws from it gets the same numbers in a replay.
    seeds = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with seeds, torch.enable_grad(), without_canaries():
        torch.manual_seed(cell.seed)
        if cell.candidate.worker is not None:
            cell.candidate.worker.seed = cell.seed
        try:
            reason = exempt(cell, relation)
            if reason:
                yield cell.skip(relation, reason)
            else:
                yield from RELATIONS[relation](cell)
        except MissingTolerance:
            raise
        except BackendUnavailable as error:
            yield cell.skip(relation, str(error))
        except Exception as error:  # The result could not even be compared.
            yield cell.failed(relation, "check", Misbehaved(f"{type(error).__name__}: {error}", format_exc()))


def concerns(cell: Cell, relation: str) -> bool:
    """Return whether a case checks a relation."""
    return not cell.case.relations or relation in cell.case.relations


def exempt(cell: Cell, relation: str) -> str | None:
    """Return the reason why a relation is not checked for a candidate or an operator, or None."""
    if cell.case.gpu and cell.setting.device.type != "cuda":
        return "so large that it runs on a GPU only"
    if cell.case.dtype == "bf16" and cell.is_slow:
        return "Triton's interpreter multiplies BF16 as integers"
    return cell.candidate.exemption(relation) or cell.spec.exempt.get(relation) or cell.missing()
