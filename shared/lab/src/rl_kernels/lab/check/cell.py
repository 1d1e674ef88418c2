"""A cell of the checker: one candidate on one case, its inputs, its upstream gradients and its records."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch

from rl_kernels.core.contract import ALL_DTYPES, Contract, Key, Tolerance, contract
from rl_kernels.core.operator import Call, Operator
from rl_kernels.core.testing import Case, Draw, Inputs, Spec, spec_of
from rl_kernels.lab.check.candidate import Candidate, gold_inputs, readable
from rl_kernels.lab.check.compare import Comparison, magnitudes_of
from rl_kernels.lab.check.guard import Misbehaved, Results
from rl_kernels.lab.check.ran import Ran
from rl_kernels.lab.check.result import CaseId, Check, Skip
from rl_kernels.lab.check.run import PLAIN, Run
from rl_kernels.lab.check.surroundings import Surroundings

Choice = TypeVar("Choice")

LARGE = 1 << 20
"""Elements of all arguments of a case above which a call takes long."""
LARGE_SLOW = 1 << 14
"""``LARGE`` in Triton's interpreter."""


@dataclass(frozen=True)
class Setting:
    """Settings shared by all cells of a run."""

    dtype: str
    device: torch.device
    arch: str
    seed: int = 123
    grad_mode: str = "random"
    grad_seed: int = 123
    suite: str = "full"
    constant: tuple[float, int] | None = None
    """(value, token): fill the differentiable inputs and the ids with these."""
    contract: Contract = field(default_factory=contract, repr=False, compare=False)


def call_of(operator: Operator, setting: Setting) -> Call:
    """Describe the operator's plainest case to the dispatcher, as if it were on the setting's device."""
    spec = spec_of(operator)
    call = operator.describe(**spec.inputs(spec.case(), Draw(ALL_DTYPES[setting.dtype], "cpu")))
    return replace(call, device=setting.device, arch=setting.arch)


@dataclass(frozen=True)
class Cell:
    """A candidate on a case."""

    candidate: Candidate
    spec: Spec
    case: Case
    setting: Setting

    @property
    def dtype_name(self) -> str:
        """The dtype of this case's inputs, by its name in the contract."""
        return self.case.dtype or self.setting.dtype

    @property
    def is_first(self) -> bool:
        """Whether the case is the plainest of its function; checks that need only one case use it."""
        return self.case.name == self.spec.first_of(self.case.function).name

    @property
    def is_richest(self) -> bool:
        """Whether the case has the most options of all cases of its function."""
        return self.case.name == self.spec.richest_of(self.case.function).name

    @property
    def is_slow(self) -> bool:
        """Whether a call takes a thousand times longer than usual, so that checks of many calls are left out."""
        return self.candidate.is_slow(self.setting.device.type)

    def some(self, choices: Sequence[Choice]) -> Sequence[Choice]:
        """Return all choices; where calls are slow, only one, which depends on the case's name."""
        if not (choices and self.is_slow):
            return choices
        return [choices[zlib.crc32(self.case.name.encode()) % len(choices)]]

    @property
    def is_brief(self) -> bool:
        """Whether only one more kind of upstream gradient is checked.

        It is for generated and for large cases; where calls are slow, for all but the plainest and the richest.
        """
        tensors = (value for value in self.inputs.values() if isinstance(value, torch.Tensor))
        most = LARGE_SLOW if self.is_slow else LARGE
        is_plain = self.is_slow and not (self.is_first or self.is_richest)
        return bool(self.case.relations) or is_plain or sum(value.numel() for value in tensors) > most

    @cached_property
    def seed(self) -> int:
        """Seed of this case's inputs, from the run's seed and the case's name (or ``drawn_as``)."""
        name = self.case.drawn_as or self.case.name
        return (self.setting.seed + zlib.crc32(name.encode())) % 2**31

    def draw(self, salt: int = 0) -> Draw:
        """Return the source of this case's random values."""
        return Draw(ALL_DTYPES[self.dtype_name], self.setting.device, self.seed + salt)

    @cached_property
    def inputs(self) -> Inputs:
        """The case's keyword arguments."""
        drawn = self.spec.inputs(self.case, self.draw())
        inputs = {name: value for name, value in drawn.items() if name not in self.spec.spared or self.takes(name)}
        if self.setting.constant is None:
            return inputs
        value, token = self.setting.constant
        # One token for cases of all vocabulary sizes, so take it modulo the size of each.
        id = token % self.case.sizes.get("vocab", token + 1)
        fills = {**dict.fromkeys(self.spec.differentiable, value), **dict.fromkeys(self.spec.ids, id)}
        return {
            name: torch.full_like(original, fills[name])
            if name in fills and isinstance(original, torch.Tensor)
            else original
            for name, original in inputs.items()
        }

    @property
    def name(self) -> str:
        """Name of this cell within a run."""
        return f"{self.candidate.operator.name} {self.candidate.name} {self.setting.dtype} {self.case.name}"

    def case_id(self, relation: str) -> str:
        """Return the id with which ``--replay`` runs a relation on this cell again."""
        candidate = self.candidate
        return str(CaseId(candidate.operator.name, candidate.name, self.setting.dtype, relation, self.case.name))

    def redrawn(self) -> Cell:
        """Return the same cell with other random values."""
        return replace(self, setting=replace(self.setting, seed=self.setting.seed + 1))

    def takes(self, argument: str) -> bool:
        """Return whether the candidate takes an argument."""
        return self.candidate.takes(self.case.function, argument)

    def missing(self, inputs: Inputs | None = None) -> str | None:
        """Return why the candidate cannot run a call (its function, or an optional argument), or None."""
        implements = self.candidate.implements
        if implements not in (None, self.case.function):
            return f"it does not implement {self.case.function or self.candidate.operator.name}"
        arguments = self.inputs if inputs is None else inputs
        absent = [name for name in arguments if not self.takes(name)]
        return f"its signature has no {', '.join(absent)}" if absent else None

    @property
    def leaves(self) -> list[str]:
        """The arguments that require grad."""
        return [name for name in self.spec.differentiable if name in self.inputs] if self.case.grad else []

    def run(
        self, inputs: Inputs | None = None, leaves: Collection[str] | None = None, around: Surroundings = PLAIN
    ) -> Ran:
        """Call the candidate."""
        arguments = self.inputs if inputs is None else inputs
        attached = self.leaves if leaves is None else leaves
        return self.candidate.run(
            self.case.function, self.spec.output, arguments, self._allowed(attached, arguments), around
        )

    @property
    def allowed_leaves(self) -> list[str]:
        """The arguments that require grad in a plain call of the case."""
        return self._allowed(self.leaves, self.inputs)

    def _allowed(self, leaves: Collection[str], inputs: Inputs) -> list[str]:
        """Return the arguments that may require grad; none if the call writes its result into an argument."""
        written = self.spec.writes.keys() & inputs.keys()
        return [] if written else [name for name in leaves if isinstance(inputs.get(name), torch.Tensor)]

    def eager(self) -> Run:
        """Call the reference in the tested dtype."""
        return self._define(readable(self.spec, self.inputs))

    def gold(self) -> Run:
        """Call the reference in FP64."""
        return self._define(gold_inputs(self.spec, self.inputs))

    def magnitudes(self, upstream: Results) -> Mapping[str, torch.Tensor]:
        """Return result name -> sums of the terms' magnitudes."""
        inputs, dtype = gold_inputs(self.spec, self.inputs), ALL_DTYPES[self.dtype_name]
        return magnitudes_of(self.spec, self.case, inputs, upstream, dtype)

    def _define(self, inputs: Inputs) -> Run:
        reference = self.spec.references[self.case.function]
        return Run(lambda kwargs: reference(**kwargs), self.spec.output, inputs, self.allowed_leaves)

    def upstream(self, run: Ran) -> Results:
        """Return an upstream gradient for each output of ``run`` that carries a gradient."""
        if self.spec.writes.keys() & self.inputs.keys():
            return {}
        draw = Draw(torch.float64, self.setting.device, self.setting.grad_seed + self.seed)
        ones = self.setting.grad_mode == "ones"
        values = {name: value for name, value in run.outputs.items() if name in run.attached}
        return {
            name: torch.ones_like(value) if ones else draw.normal(*value.shape, dtype=value.dtype)
            for name, value in values.items()
        }

    def tolerance(self, relation: str, item: str, dtype: torch.dtype | None = None) -> Tolerance:
        """Return the contract's row for an output or gradient on this architecture."""
        return self.setting.contract.tolerance(*self.row(relation, item, dtype), self.setting.arch)

    def general(self, relation: str, item: str, dtype: torch.dtype | None = None) -> Tolerance:
        """Return the contract's row for all architectures."""
        return self.setting.contract.rows[self.row(relation, item, dtype)]

    def row(self, relation: str, item: str, dtype: torch.dtype | None = None) -> Key:
        """Return the key of the row; a result of a coarser dtype uses that dtype's row."""
        direction = "gradient" if item.startswith("gradient:") else "forward"
        name = self.dtype_name
        if dtype is not None and torch.finfo(dtype).eps > torch.finfo(ALL_DTYPES[name]).eps:
            name = next(known for known, value in ALL_DTYPES.items() if value == dtype)
        return relation, self.spec.classes[item], name, direction

    def record(
        self,
        relation: str,
        item: str,
        shape: tuple[int, ...],
        tolerance: object,
        comparison: Comparison,
        row: Key | None = None,
    ) -> Check:
        """Return the record of a comparison; ``row`` is the key of the tolerance."""
        name = self.candidate.operator.name
        identity = (name, self.candidate.name, relation, self.case.name, item, self.setting.dtype)
        return Check(*identity, shape, str(tolerance), comparison, self.seed, row)

    def failed(self, relation: str, item: str, reason: str | Misbehaved) -> Check:
        """Return a failed check, for a result that could not be compared."""
        traceback = reason.traceback if isinstance(reason, Misbehaved) else ""
        return self.record(relation, item, (), "-", Comparison(False, message=str(reason), traceback=traceback))

    def skip(self, relation: str, reason: str) -> Skip:
        """Return the record of a check that did not run."""
        candidate = self.candidate
        return Skip(candidate.operator.name, candidate.name, relation, self.case.name, self.setting.dtype, reason)
