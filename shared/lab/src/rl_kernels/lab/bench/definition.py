"""The description of a benchmark in an operator's ``bench.py``: shapes, timed passes, unavoidable work, and peers.

``rl-kernels bench`` reads this one description, as the checker reads ``cases.SPEC``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from rl_kernels.core.operator import Operator
from rl_kernels.core.testing import Case, Inputs
from rl_kernels.lab.check.rows import RowLayout

FORWARD, BOTH = "forward", "forward + backward"
GOALS, SMALL, HOST = "goals", "small", "host"
"""Sets of shapes that every operator has: the default on a GPU, the default on a CPU, and calls so small that host time
dominates."""


class Work(NamedTuple):
    """Work that no implementation can avoid: bytes moved to or from memory, and floating-point operations."""

    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Pass:
    """One timed pass: the call of a case, alone or with its backward, and its work."""

    case: Case
    work: Work
    backward: bool = False


@dataclass(frozen=True)
class Shape:
    """A shape of a set.

    Attributes:
        sizes: sizes in the order of ``Benchmark.shape``.
        options: options of the case, beyond the benchmark's own.
        note: what is special about the shape; part of its label.
        group: name of the group of shapes whose geometric mean is reported.
        without: peers that are excluded for this shape unless requested by name.
    """

    sizes: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    group: str = ""
    without: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """The sizes, and the note if there is one."""
        return "x".join(map(str, self.sizes)) + (f" {self.note}" if self.note else "")


CaseOptions = Mapping[str, Any]
"""The type of ``Shape.options`` and ``Case.options``."""


@dataclass(frozen=True)
class Option:
    """A numeric option of the operator that is also a flag of ``rl-kernels bench``.

    Attributes:
        type: turns the flag's text into the value, or raises ``argparse.ArgumentTypeError``: see ``core.command``.
        help: text for ``--help``.
        given: ``(options of a case, value) -> options of the case``, if it changes more than the one argument.
    """

    type: Callable[[str], float]
    help: str
    given: Callable[[CaseOptions, float], CaseOptions] | None = None


@dataclass(frozen=True)
class Peer:
    """Another implementation, timed beside ours.

    Attributes:
        make: imports what it needs, and returns the function that takes a case's keyword arguments; None for a backend.
        backend: name of another backend of ours, if that is the peer.
        package: distribution to install for it; empty for PyTorch.
        note: remark for a reader of the table.
        passes: passes that it can run; empty for all.
        dtypes: dtypes of inputs that it is timed for, unless it is requested by name; empty for all.
        scalar: its result is one number, the sum of ours.
        overwrites: it writes to its inputs, so it gets copies.
        waits: it waits for the device, so its calls cannot be captured in a CUDA graph.
        checked: False if it computes something else, such as only the matrix product of a loss.
        around: context manager in which it is timed.
        environment: variables that must be set before the first product of the process.
    """

    make: Callable[[], Callable[..., Any]] | None
    package: str = ""
    note: str = ""
    backend: str = ""
    passes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    scalar: bool = False
    overwrites: bool = False
    waits: bool = False
    checked: bool = True
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """The benchmark of an operator.

    Attributes:
        shape: names of the sizes, in the order in which ``--shapes`` takes them.
        sets: name -> shapes; must have ``goals``, ``small`` and ``host``.
        passes: ``(shape, bytes of an element) -> name -> Pass``, in the order of the table.
        peers: name -> peer.
        rows: public function -> its row layout; a function without one is checked in one piece.
        dtype: name of the default dtype; empty for the default of the device.
        options: argument -> numeric option of the operator; each is a flag.
        tokens: number of tokens of a shape, for tables that also show tokens per second.
    """

    shape: tuple[str, ...]
    sets: Mapping[str, Sequence[Shape]]
    passes: Callable[[Shape, int], Mapping[str, Pass]]
    peers: Mapping[str, Peer]
    rows: Mapping[str, RowLayout] = field(default_factory=dict)
    dtype: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    tokens: Callable[[Shape], int] | None = None

    def with_options(self, shape: Shape, values: Mapping[str, float]) -> Shape:
        """Return a shape with these options set; its note names them."""
        options: CaseOptions = shape.options
        for name, value in values.items():
            apply = self.options[name].given
            options = {**options, name: value} if apply is None else apply(options, value)
        labels = [f"{name}={value:g}" for name, value in values.items()]
        return replace(shape, options=options, note=", ".join(filter(None, [shape.note, *labels])))


def bench_of(operator: Operator) -> Benchmark:
    """Import and return the ``BENCH`` of an operator's ``bench`` module."""
    return importlib.import_module(operator.bench).BENCH


def forward_and_backward(case: Case, forward: Work, both: Work) -> dict[str, Pass]:
    """Return the two passes of an ordinary operator."""
    return {FORWARD: Pass(case, forward), BOTH: Pass(case, both, backward=True)}


def plain(function: Callable[..., Any], note: str = "") -> Peer:
    """Return the peer that is plain PyTorch as users write it."""
    return Peer(lambda: function, note=note)


def compiled(function: Callable[..., Any]) -> Peer:
    """Return the peer that is plain PyTorch under ``torch.compile``, compiled anew for each shape."""

    def make() -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return Peer(make, note="torch.compile of eager")


def bytes_of(inputs: Inputs) -> int:
    """Return the bytes of the tensors of a call."""
    return sum(value.nbytes for value in inputs.values() if isinstance(value, torch.Tensor))
