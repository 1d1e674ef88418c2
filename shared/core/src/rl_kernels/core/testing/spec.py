"""The description of an operator in its ``cases.py``: cases, definition, classes, promised layouts and illegal calls.

Tests, checker and docs all read this one description; adding an operator edits no file of the core.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from rl_kernels.core.operator import Operator
from rl_kernels.core.testing.draw import Draw
from rl_kernels.core.testing.grouped import flat

Inputs = dict[str, Any]
"""Keyword arguments of a public function."""
IGNORED = -100
"""The id of padding rows, for operators with ``ignore_index``."""


@dataclass(frozen=True)
class Case:
    """One named call of an operator, before its tensors are drawn.

    Attributes:
        name: unique within the operator.
        sizes: sizes by the names of the checker's shape flags (``batch``, ``seq``, ``vocab``, ...).
        options: changes that ``Spec.inputs`` makes for this case.
        function: the package's public function that is called; by default the operator itself.
        suite: ``quick`` cases run always, ``full`` ones in the full suite only.
        grad: False if no input of this call may require grad.
        relations: the relations that are checked; empty for all. Generated cases check only a few.
        dtype: dtype of its inputs, in place of the run's: ``fp64``, ``bf16``.
        drawn_as: name from which its random numbers are seeded, by default its own. Cases with the same numbers and
            other options catch a cache that looks at values alone.
        gpu: so large that it runs on a GPU only.
    """

    name: str
    sizes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    function: str = ""
    suite: Literal["quick", "full"] = "quick"
    grad: bool = True
    relations: tuple[str, ...] = ()
    dtype: str = ""
    drawn_as: str = ""
    gpu: bool = False

    def resized(self, sizes: Mapping[str, int]) -> Case:
        """Return the case with some sizes replaced."""
        return replace(self, sizes={**self.sizes, **sizes})


def _identity(name: str, value: torch.Tensor) -> torch.Tensor:
    return value


@dataclass(frozen=True)
class Variant:
    """The same computation in another layout, and where to find its results.

    Results have the names of outputs (``logp``, ``output``) or ``gradient:NAME``. For each result of the base call,
    ``pick(name, result)`` gives the elements to compare, or None if this variant says nothing about that result;
    ``find(name, result of the variant)`` gives the same elements; their bits must be equal. ``lift`` turns the base
    call's upstream gradient of an output into the variant's. ``threads`` is the number of CPU threads.
    """

    label: str
    inputs: Inputs
    pick: Callable[[str, torch.Tensor], torch.Tensor | None] = _identity
    find: Callable[[str, torch.Tensor], torch.Tensor] = _identity
    lift: Callable[[str, torch.Tensor], torch.Tensor] = _identity
    threads: int | None = None


Transform = Callable[[Case, Inputs, Draw], Iterator[Variant]]
"""Yields variants of a base call that must be bitwise identical to it; none if it does not apply."""


Change = Callable[[Inputs], Inputs]
"""Edits the keyword arguments of a good call."""


def given(**changes: Any) -> Change:
    """Return a change that gives these arguments."""
    return lambda inputs: {**inputs, **changes}


def edited(name: str, edit: Callable[[Any], Any]) -> Change:
    """Return a change that edits one argument."""
    return lambda inputs: {**inputs, name: edit(inputs[name])}


@dataclass(frozen=True)
class IllegalCall:
    """A call that must raise: ``change`` edits the keyword arguments of a good call.

    Attributes:
        name: unique within the operator.
        change: the good call's keyword arguments -> the bad call's.
        error: the exception type, exactly or a subclass.
        match: regular expression that the message must contain; it names the argument.
        case: name of the case that is the good call; the operator's first by default.
    """

    name: str
    change: Change
    error: type[Exception]
    match: str
    case: str = ""


def _never_waits(inputs: Inputs, backend: str | None) -> None:
    """Return None: no call waits."""


@dataclass(frozen=True)
class Spec:
    """Everything that the checker knows about an operator.

    Attributes:
        cases: the first is the operator's plainest; every optional argument takes a non-default value in some case.
        inputs: draws a case's keyword arguments.
        references: function name -> its definition. Called with the same keyword arguments except ``unread``, on FP64
            inputs for the gold and on the tested dtype for the error of plain eager PyTorch; it names the outputs,
            and gives their shapes and dtypes.
        classes: result name -> class of the tolerance contract.
        differentiable: arguments that have a gradient.
        magnitudes: ``(case, inputs, upstream) -> result name -> magnitudes``: for each element, the FP64 sum of the
            magnitudes of the terms that it adds up, which bounds its rounding error.
        deviations: the same arguments -> result name -> standard deviations: for each element of results that add up
            many terms, that of its error if each intermediate value v that the operator rounds to the dtype of the
            inputs had an error of standard deviation ``2^floor(log2(abs(v)))``.
        transforms: name -> layouts that must not change a bit.
        illegal: calls that must raise.
        hygiene: name -> transforms that put garbage where nothing may be read.
        empty: cases whose results have no elements, or are sums of no terms.
        writes: argument -> the result that it holds after the call.
        inplace: option -> the argument that it lets the backward overwrite.
        groups: argument that groups several options -> its type; cases, references and the other fields name the
            options.
        unread: arguments that choose how to compute, not what: the reference does not take them.
        uncased: optional arguments that no case gives: tests of the package do.
        output: name of the result, if it is a single tensor.
        spared: options that only add outputs or bound memory: an implementation that does not take one is called
            without it.
        ids: arguments that hold token ids.
        indexed: the argument that lists the rows which are computed, if there is one.
        main_grad: arguments whose gradient is added to their attribute ``main_grad``, where they have one.
        autocast: function -> the arguments that autocast casts; no others.
        masks: arguments that are masks.
        on_host: arguments that may be on the host, which a captured CUDA graph cannot copy.
        eager_only: options that torch.compile must refuse, naming the option.
        waits: ``inputs`` of a call whose values are not checked, backend -> why it may wait for the device, or None.
        exempt: relation name -> why it is not checked for this operator.
    """

    cases: Sequence[Case]
    inputs: Callable[[Case, Draw], Inputs]
    references: Mapping[str, Callable[..., Any]]
    classes: Mapping[str, str]
    differentiable: Sequence[str]
    magnitudes: Callable[[Case, Inputs, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
    transforms: Mapping[str, Transform]
    illegal: Sequence[IllegalCall]
    deviations: Callable[[Case, Inputs, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None = None
    hygiene: Mapping[str, Transform] = field(default_factory=dict)
    empty: Sequence[Case] = ()
    writes: Mapping[str, str] = field(default_factory=dict)
    inplace: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, type] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    uncased: frozenset[str] = frozenset({"validate", "backend", "process_group"})
    output: str = "output"
    spared: frozenset[str] = frozenset()
    ids: Sequence[str] = ()
    indexed: str = ""
    main_grad: frozenset[str] = frozenset()
    autocast: Mapping[str, Sequence[str]] = field(default_factory=dict)
    masks: Sequence[str] = ()
    on_host: frozenset[str] = frozenset()
    eager_only: frozenset[str] = frozenset()
    waits: Callable[[Inputs, str | None], str | None] = _never_waits
    exempt: Mapping[str, str] = field(default_factory=dict)

    def case(self, name: str = "") -> Case:
        """Return a case by name, by default the first."""
        return next(case for case in self.cases if name in ("", case.name))

    def first_of(self, function: str) -> Case:
        """Return the plainest case of a function."""
        return next(case for case in self.cases if case.function == function)

    def richest_of(self, function: str) -> Case:
        """Return the named quick case of a function with the most options, of the cases that overwrite no argument."""
        writing = {*self.inplace, *self.writes}
        cases = [case for case in self.cases if case.function == function and case.suite == "quick"]
        named = [case for case in cases if not (case.relations or writing & case.options.keys())]
        return max(named or cases, key=lambda case: len(case.options))

    def ignored(self, inputs: Inputs) -> torch.Tensor | None:
        """Return where the outputs of a call are ignored, in the shape of its ids; None if no position can be."""
        ids = next((inputs[name] for name in self.ids if name in inputs), None)
        if ids is None:
            return None
        ignored = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
        if inputs.get("ignore_index") is not None:
            ignored = ids == inputs["ignore_index"]
        if self.indexed in inputs:
            unlisted = torch.ones_like(ignored).flatten().index_fill(0, inputs[self.indexed].long(), False)
            ignored = ignored.flatten() | unlisted
        return ignored.view(ids.shape)

    def overwritten(self, inputs: Inputs) -> set[str]:
        """Return the arguments that this call may write to."""
        inplace = {argument for option, argument in self.inplace.items() if inputs.get(option)}
        return inplace | (self.writes.keys() & inputs.keys())

    def size_names(self) -> tuple[str, ...]:
        """Return the shape flags that the cases use, in order of appearance."""
        return tuple(dict.fromkeys(name for case in self.cases for name in case.sizes))


def function_of(operator: Operator, name: str = "") -> Callable[..., Any]:
    """Return a public function of an operator as cases call it: each member of a group is an argument."""
    return flat(operator.function(name), spec_of(operator).groups)


def spec_of(operator: Operator) -> Spec:
    """Import and return the ``SPEC`` of an operator."""
    return importlib.import_module(operator.spec).SPEC
