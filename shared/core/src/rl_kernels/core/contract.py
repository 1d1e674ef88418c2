"""The tolerance contract: the largest allowed error of each comparison, the same for every backend.

``tolerance_contract.json`` holds one row for each (relation, op_class, dtype, direction). A missing row is an error,
never a default, and no backend can relax a row for itself. An architecture may override rows by its key. A row also
says where its values come from, and how large the errors of plain PyTorch are, as measured by ``tools/calibrate.py``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes that every operator takes, by their names on the command line."""
ALL_DTYPES = {**DTYPES, "fp64": torch.float64}
"""Dtypes that the contract has rows for: a case may set its own dtype, such as FP64."""
DIRECTIONS = ("forward", "gradient")
CLASSES = ("elementwise", "reduction", "logprob", "attention")
RELATIONS = ("accuracy", "parity", "invariance", "repeatability")
"""Relations that compare numbers; all other relations compare exactly and need no row."""


class MissingTolerance(LookupError):
    """The contract has no row for a comparison, or does not know the architecture."""


class Errors(NamedTuple):
    """Errors of one way of computing, over all results of a row, against the definition in FP64."""

    max_abs: float
    """Largest absolute error."""
    share: float
    """Largest share of the fence that an element used: ``max(error / (atol + rtol * |gold|))``."""
    inside: int
    """Number of results inside the fence."""
    case: str
    """The case with that share, in the form that ``rl-kernels check --replay`` takes."""
    item: str
    """Name of the output, or ``gradient:NAME``."""
    seed: int
    """``--seed`` of its inputs."""


class Measured(NamedTuple):
    """Errors of plain PyTorch, for one row of accuracy."""

    results: int
    """Number of outputs and gradients that were compared."""
    eager: Errors
    """The definition as written: it computes in FP32 for inputs of a smaller dtype."""
    same_dtype: Errors
    """The definition without its casts to a wider dtype."""


class Calibration(NamedTuple):
    """The setup in which the ``measured`` values were measured."""

    torch: str
    device: str
    suite: str
    seeds: tuple[int, ...]


class Tolerance(NamedTuple):
    """One row: ``|a - b| <= atol + rtol * |b|``, or equal bits."""

    atol: float
    rtol: float
    bitwise: bool
    provenance: str
    measured: Measured | None = None

    def __str__(self) -> str:
        return "bitwise" if self.bitwise else f"{self.atol:g}/{self.rtol:g}"


Key = tuple[str, str, str, str]
Filled = TypeVar("Filled", Errors, Measured, Calibration)
NAMES = (RELATIONS, CLASSES, tuple(ALL_DTYPES), DIRECTIONS)
"""Allowed values of the first four fields of a row."""
DOCUMENT_KEYS = ("version", "calibration", "arch_overrides", "rows")
ROW_KEYS = ("relation", "op_class", "dtype", "direction", "atol", "rtol", "bitwise", "provenance", "measured")


KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
"""Names of these types in error messages."""


@dataclass(frozen=True)
class Contract:
    """The parsed contract."""

    version: str
    rows: Mapping[Key, Tolerance]
    overrides: Mapping[str, Mapping[Key, Tolerance]]
    calibration: Calibration | None = None
    file: str = ""
    """The file that it was read from, if it is not the one that ships with this package."""

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
    """Build a contract from its JSON document.

    Raises:
        ValueError: a missing or unknown key, a value of another kind, two rows for one comparison, or measured values
            without ``calibration``.
    """
    _check_type(document, dict, "the tolerance contract")
    _check_known(document, DOCUMENT_KEYS, "the tolerance contract")
    _check_required(document, ("version", "arch_overrides", "rows"), "the tolerance contract")
    for name, kind in (("version", str), ("arch_overrides", dict), ("rows", list)):
        _check_type(document[name], kind, name)
    overrides = {}
    for arch, rows in document["arch_overrides"].items():
        _check_type(rows, list, f"arch_overrides: {arch}")
        overrides[arch] = _rows(rows)
    calibration = None
    if "calibration" in document:
        calibration = _filled(Calibration, document["calibration"], "calibration")
        calibration = calibration._replace(seeds=tuple(calibration.seeds))
    rows = _rows(document["rows"])
    if calibration is None and any(row.measured for table in (rows, *overrides.values()) for row in table.values()):
        raise ValueError("the tolerance contract has measured rows, but no calibration that says how")
    return Contract(document["version"], rows, overrides, calibration)


def _rows(rows: list[Mapping[str, Any]]) -> dict[Key, Tolerance]:
    parsed: dict[Key, Tolerance] = {}
    for number, row in enumerate(rows, 1):
        _check_type(row, dict, f"row {number}")
        _check_required(row, ROW_KEYS[:6], f"row {number}")
        key = (row["relation"], row["op_class"], row["dtype"], row["direction"])
        where = f"row {' / '.join(map(str, key))}"
        _check_required(row, ("provenance",), where)
        _check_known(row, ROW_KEYS, where)
        for name, value, known in zip(ROW_KEYS, key, NAMES, strict=False):
            if value not in known:
                raise ValueError(f"{where}: {name}: expected one of {', '.join(known)}, got {value!r}")
        for name in ("atol", "rtol"):
            if type(row[name]) not in (int, float) or not (isfinite(row[name]) and row[name] >= 0):
                raise ValueError(f"{where}: {name}: expected a finite number >= 0, got {row[name]!r}")
        for name, kind in (("bitwise", bool), ("provenance", str)):
            if type(row.get(name, kind())) is not kind:
                raise ValueError(f"{where}: {name}: expected a {kind.__name__}, got {row[name]!r}")
        if key in parsed:
            raise ValueError(f"the tolerance contract has two rows for {' / '.join(key)}")
        measured = _measured(row["measured"], where) if "measured" in row else None
        parsed[key] = Tolerance(row["atol"], row["rtol"], row.get("bitwise", False), row["provenance"], measured)
    return parsed


def _measured(values: Mapping[str, Any], where: str) -> Measured:
    measured = _filled(Measured, values, f"{where}: measured")
    eager, same = (_filled(Errors, values[name], f"{where}: {name}") for name in ("eager", "same_dtype"))
    return measured._replace(eager=eager, same_dtype=same)


def _filled(kind: type[Filled], values: Mapping[str, Any], where: str) -> Filled:
    _check_known(values, kind._fields, where)
    _check_required(values, kind._fields, where)
    return kind(**values)


def _check_type(value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{where}: expected {KINDS[kind]}, got {value!r:.40}")


def _check_required(values: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(f"{where}: no {', '.join(missing)}")


def _check_known(values: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    unknown = sorted(values.keys() - set(keys))
    if unknown:
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; known: {', '.join(keys)}")


@functools.cache
def contract() -> Contract:
    """Return the contract that ships with this package."""
    return parse(json.loads(files("rl_kernels.core").joinpath("tolerance_contract.json").read_text("utf-8")))


def read_contract(path: Path) -> Contract:
    """Read a user's contract: a file like ``tolerance_contract.json``, with a row for each comparison.

    Raises:
        ValueError: it cannot be read, is not a contract, or lacks rows; the one-line message names the file.
    """
    try:
        parsed = parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a tolerance contract: {error}") from error
    missing = [" / ".join(key) for key in product(*NAMES) if key not in parsed.rows]
    if missing:
        more = f", and {len(missing) - 1} others" if missing[1:] else ""
        raise ValueError(f"{path} has no row for {missing[0]}{more}")
    return replace(parsed, file=str(path))
