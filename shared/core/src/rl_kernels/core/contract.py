"""The tolerance contract: how far an output may be from what it is compared with, for every backend alike.

``tolerance_contract.json`` holds one row for each (relation, op_class, dtype, direction). A missing row is an error,
never a default, and no backend can relax a row for itself. An architecture may override rows by its key.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes that the contract has rows for, by their names on the command line."""
DIRECTIONS = ("forward", "gradient")
CLASSES = ("elementwise", "reduction", "logprob")
RELATIONS = ("accuracy", "parity", "invariance", "repeatability")
"""Relations that compare numbers; the others compare exactly and need no row."""


class MissingTolerance(LookupError):
    """The contract has no row for a comparison, or does not know the architecture."""


class Tolerance(NamedTuple):
    """One row: ``|a - b| <= atol + rtol * |b|``, or equal bits."""

    atol: float
    rtol: float
    bitwise: bool
    provenance: str

    def __str__(self) -> str:
        return "bitwise" if self.bitwise else f"{self.atol:g}/{self.rtol:g}"


Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Contract:
    """The parsed contract."""

    version: str
    rows: Mapping[Key, Tolerance]
    overrides: Mapping[str, Mapping[Key, Tolerance]]

    @property
    def archs(self) -> tuple[str, ...]:
        """Architecture keys that the contract knows."""
        return tuple(self.overrides)

    def tolerance(self, relation: str, op_class: str, dtype: str, direction: str, arch: str) -> Tolerance:
        """Return the row of a comparison.

        Raises:
            MissingTolerance: there is none, or ``arch`` is not a key of the contract.
        """
        if arch not in self.overrides:
            raise MissingTolerance(f"arch {arch!r} is not in the tolerance contract; known: {', '.join(self.archs)}")
        key = (relation, op_class, dtype, direction)
        row = self.overrides[arch].get(key) or self.rows.get(key)
        if row is None:
            raise MissingTolerance(f"the tolerance contract has no row for {' / '.join(key)}")
        return row


def parse(document: Mapping[str, Any]) -> Contract:
    """Build a contract from its JSON document; a duplicate row is a ``ValueError``."""
    overrides = {arch: _rows(rows) for arch, rows in document["arch_overrides"].items()}
    return Contract(document["version"], _rows(document["rows"]), overrides)


def _rows(rows: list[Mapping[str, Any]]) -> dict[Key, Tolerance]:
    found: dict[Key, Tolerance] = {}
    for row in rows:
        key = (row["relation"], row["op_class"], row["dtype"], row["direction"])
        if key in found:
            raise ValueError(f"the tolerance contract has two rows for {' / '.join(key)}")
        found[key] = Tolerance(row["atol"], row["rtol"], row.get("bitwise", False), row["provenance"])
    return found


@functools.cache
def contract() -> Contract:
    """Return the contract that ships with this package."""
    return parse(json.loads(files("rl_kernels.core").joinpath("tolerance_contract.json").read_text("utf-8")))
