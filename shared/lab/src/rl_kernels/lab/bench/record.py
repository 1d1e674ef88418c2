"""The results of a run: one record for each implementation of an operator on a shape, in a JSON document."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_kernels.core.command import write_json
from rl_kernels.lab.bench.definition import Work
from rl_kernels.lab.bench.measure import Ceilings, Timing

OURS = "rl-kernels"
VERSION = 2


@dataclass(frozen=True)
class Measured:
    """One pass of one implementation.

    Attributes:
        timing: time and memory.
        rate: unavoidable work per second, in ``unit``.
        unit: ``TB/s`` or ``TFLOP/s``, whichever bounds the work.
        share: share of the floor: the time that the measured ceiling needs for that work, over the time taken.
        ratio: our time over its, on a GPU from samples taken in turn; None for ours.
        call_ratio: the same ratio for the wall time of a real call, from batches taken in turn, on a CPU too.
    """

    timing: Timing
    rate: float
    unit: str
    share: float
    ratio: float | None = None
    call_ratio: float | None = None

    @classmethod
    def of(
        cls, timing: Timing, work: Work, ceilings: Ceilings, ours: Timing | None, call_ratio: float | None = None
    ) -> Measured:
        """Relate a time to the work, the ceilings of the device and our time."""
        seconds = timing.ms * 1e-3
        moved, computed = work.bytes / ceilings.bytes_per_s, work.flops / ceilings.flops_per_s
        amount, unit = (work.bytes, "TB/s") if moved >= computed else (work.flops, "TFLOP/s")
        measured = cls(timing, amount / seconds * 1e-12, unit, max(moved, computed) / seconds)
        if ours is None:
            return measured
        return replace(measured, ratio=(timing.beside_ms or ours.ms) / timing.ms, call_ratio=call_ratio)


@dataclass
class Record:
    """One implementation of an operator on one shape.

    Attributes:
        operator: its registry name.
        shape: the sizes and the note.
        sizes: the sizes alone.
        group: name of the group of shapes whose geometric mean is reported.
        dtype: dtype of the inputs.
        implementation: ``rl-kernels``, or a peer.
        backend: the backend that ran, for ours.
        note: remark for a reader of the table.
        passes: name of the pass -> its measurement.
        checked: passes -> the reference that the result was compared with, and its error.
        skipped: pass (or empty for all) -> reason why there is no time.
        wrong: error of a wrong result, which has no time either; empty if it is right.
        options: numeric options of the operator that were given on the command line.
        tokens: number of tokens, if the benchmark counts them.
    """

    operator: str
    shape: str
    sizes: tuple[int, ...]
    group: str
    dtype: str
    implementation: str
    backend: str = ""
    note: str = ""
    passes: dict[str, Measured] = field(default_factory=dict)
    checked: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    wrong: str = ""
    options: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    @property
    def ours(self) -> bool:
        """Whether it is an implementation of this project."""
        return self.implementation == OURS

    @property
    def name(self) -> str:
        """The implementation, and the backend if it is ours."""
        return f"{self.implementation} {self.backend}".rstrip()


@dataclass
class Document:
    """A whole run: where it ran, the ceilings of the device by dtype, and the records."""

    environment: Mapping[str, str]
    ceilings: dict[str, Ceilings] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    @property
    def wrong(self) -> list[Record]:
        """Records of our wrong results."""
        return [record for record in self.records if record.ours and record.wrong]

    def write(self, path: Path) -> None:
        """Write the document as strict JSON, one record a line."""
        write_json(path, {"version": VERSION, **_finite(asdict(self))})


def read(path: Path) -> Document:
    """Read a document; ``ValueError`` if the file is not one of this version."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"{path}: expected benchmark results of version {VERSION}")
    ceilings = {name: Ceilings(**values) for name, values in content["ceilings"].items()}
    return Document(content["environment"], ceilings, [_record(values) for values in content["records"]])


def _record(values: dict[str, Any]) -> Record:
    passes = {
        name: Measured(**{**measured, "timing": Timing(**measured["timing"])})
        for name, measured in values["passes"].items()
    }
    return Record(**{**values, "sizes": tuple(values["sizes"]), "passes": passes})


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
