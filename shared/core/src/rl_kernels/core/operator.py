"""Definitions of an operator, of a backend with its promises, and of the call by which a backend is chosen.

Everything here is a frozen dataclass, so that it can be read under ``torch.compile`` and compared in tests. This module
knows no operator and imports no backend.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import torch

Promise = Literal["invariant", "repeatable", "differentiable"]

INVARIANT: frozenset[Promise] = frozenset({"invariant", "repeatable", "differentiable"})
"""A row's bits depend on that row alone; same inputs give the same bits; gradients are provided."""
REPEATABLE: frozenset[Promise] = frozenset({"repeatable", "differentiable"})
"""Same inputs give the same bits, but a row's bits may depend on the batch; gradients are provided."""


def arch_of(device_type: str, index: int | None = None) -> str:
    """Name the architecture of a device as the tolerance contract does: ``cpu``, ``sm90``, ``gfx942``."""
    if device_type != "cuda":
        return archs_of_devices.get(device_type, device_type)
    if index is None or torch.compiler.is_compiling():
        return _arch_of_gpu(index)
    if index not in _archs:
        _archs[index] = _arch_of_gpu(index)
    return _archs[index]


archs_of_devices: dict[str, str] = {}
"""Architecture that meta tensors stand for during ahead-of-time compilation (triton_lib/ahead.py), by device type."""
_archs: dict[int, str] = {}
"""A cache by GPU index: every call needs the architecture, and asking the driver is slow."""


def _arch_of_gpu(index: int | None) -> str:
    if torch.version.hip:
        return torch.cuda.get_device_properties(index or 0).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm{major}{minor}"


def tiles_change_no_bit(device: torch.device) -> bool:
    """Say whether tiles and loads of Triton kernels were shown to change no bit here, so that rows may choose them."""
    return arch_of(device.type, device.index) == "sm90"


@dataclass(frozen=True)
class Call:
    """A call as seen by the choice of a backend: without row counts, so that bits do not depend on the batch.

    Attributes:
        device: device of all tensors of the call.
        dtype: dtype of the operands.
        arch: ``cpu``, ``sm90``, ``gfx942``, ...
        traits: sizes other than row counts (``V``, ``D``, ``K``), and facts such as ``layout``.
    """

    device: torch.device
    dtype: torch.dtype
    arch: str
    traits: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tensor: torch.Tensor, **traits: Any) -> Call:
        """Describe a call by its leading tensor and its traits."""
        device = tensor.device
        return cls(device, tensor.dtype, arch_of(device.type, device.index), traits)


def no_limits(call: Call) -> str | None:
    """Accept every call: the default of ``Backend.limits``."""
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator.

    Attributes:
        name: its name in ``backend=`` and ``explain``: ``native``, ``triton``, ``cuda-generic``, ``cuda-sm90``.
        module: import path of its module, which holds one function for each schema of the operator; imported at
            first use only.
        promises: device type -> promises on it; a device type that is not a key is not supported.
        limits: ``call -> reason``: why it cannot run this call, or None. An exception propagates.
        by_name: device types on which it runs only if it is asked for by name.
        note: ``call -> text``: the note that ``explain`` adds if it is chosen, or None.
    """

    name: str
    module: str
    promises: Mapping[str, frozenset[Promise]]
    limits: Callable[[Call], str | None] = no_limits
    by_name: frozenset[str] = frozenset()
    note: Callable[[Call], str | None] = no_limits

    def why_not(self, call: Call) -> str | None:
        """Say why this backend cannot run this call, or return None if it can."""
        if call.device.type not in self.promises:
            return f"runs on {', '.join(self.promises)}, but the tensors are on {call.device.type}"
        return self.limits(call)

    def load(self) -> ModuleType:
        """Import and return the backend's module."""
        # Called for every op: a look-up is faster than import_module, which takes the import lock.
        return sys.modules.get(self.module) or importlib.import_module(self.module)


@dataclass(frozen=True)
class Operator:
    """An operator as its package announces it (entry point group ``rl_kernels.operators``).

    Attributes:
        name: registry name, which is also the name of the public function.
        package: import path; holds the public functions.
        summary: one line for lists.
        shape: names of the sizes that ``explain --shape`` takes, in order.
        rows: the sizes that are row counts; the choice of a backend never sees them.
        schemas: raw op name -> ``torch.library`` schema; the last argument is always ``str backend``.
        fakes: raw op name -> its shape function, without the ``backend`` argument.
        backends: in order of priority.
        describe: the public function's arguments -> ``Call``.
        aliases: other registry names of its function.
        functions: the package's other public functions, which the registry knows by their names.
        distribution: name to ``pip install``; by default made from ``package``, as in ``rl-kernels-grpo-loss``.
        spec: import path of the module that holds its ``SPEC``; by default ``spec.cases`` of the package. A package
            with several operators has one for each.
        bench: import path of the module that holds its ``BENCH``; by default ``spec.bench`` of the package.
        canary: import path of the module with the calls of its canary (``core.canary``): ``results`` and
            ``gradients`` take (dtype, device, backend) and yield tensors. Its records are in the JSON file of
            that name beside it. By default it has none.
    """

    name: str
    package: str
    summary: str
    shape: tuple[str, ...]
    rows: frozenset[str]
    schemas: Mapping[str, str]
    fakes: Mapping[str, Callable[..., Any]]
    backends: tuple[Backend, ...]
    describe: Callable[..., Call]
    aliases: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    distribution: str = ""
    spec: str = ""
    bench: str = ""
    canary: str = ""

    def __post_init__(self) -> None:
        """Fill in what follows from the name and the package."""
        defaults = {
            "distribution": re.sub(r"[._]", "-", self.package),
            "spec": f"{self.package}.spec.cases",
            "bench": f"{self.package}.spec.bench",
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or value)

    def backend(self, name: str) -> Backend:
        """Return the backend of that name; ``ValueError`` lists the known ones."""
        for backend in self.backends:
            if backend.name == name:
                return backend
        known = ", ".join(backend.name for backend in self.backends)
        raise ValueError(f"backend: {self.name} has no backend {name!r}; it has: auto, {known}")

    def function(self, name: str = "") -> Callable[..., Any]:
        """Return a public function of the package, by default the one the operator is named after."""
        return getattr(importlib.import_module(self.package), name or self.name)
