"""Record the launches of a Triton backend without a GPU or Triton, to test its host code.

Inside ``TritonRecorder.pretended()``, ``import triton`` gives a Triton that records kernels instead of running them.
All our modules that import Triton are imported anew, as on a GPU of the given architecture. Arguments get the names of
the kernel's parameters, and a few lines of PyTorch may stand in for a kernel, as in ``launches``.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from rl_kernels.core.calls import forget
from rl_kernels.core.testing.launches import check_grid

STREAM = 7
"""The current stream of the first simulated GPU; GPU i has stream 7 + i."""
ALIGNED = 16
"""Triton specializes a kernel on addresses and integers that are multiples of this."""
STUBS = ("triton", "triton.language", "triton.tools", "triton.tools.tensor_descriptor")


class Constant:
    """Stands in for ``tl.constexpr``."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class Descriptor:
    """Stands in for ``TensorDescriptor``; checks what TMA requires of the tensor.

    The descriptor may have extra leading dims of size 1, or be of the transpose of a matrix.
    """

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]

    def __post_init__(self) -> None:
        size = self.base.itemsize
        assert self.base.data_ptr() % ALIGNED == 0, "descriptor: address not a multiple of 16 bytes"
        assert len(self.shape) == len(self.strides) == len(self.block_shape), f"dims of {self.shape}"
        assert self.strides[-1] == 1, f"descriptor: expected column stride 1, got {self.strides[-1]}"
        for step in self.strides[:-1]:
            assert step > 0, "descriptor: rows share an address"
            assert step * size % ALIGNED == 0, "descriptor: row stride not a multiple of 16 bytes"
        assert self._fits(self.value), f"{self.shape}, {self.strides} for {self.base.shape}, {self.base.stride()}"
        assert len(self.shape) > 2 or self.strides[0] >= self.shape[1], "descriptor: rows overlap"
        assert all(count & (count - 1) == 0 for count in self.block_shape), f"box not powers of 2: {self.block_shape}"
        assert self.block_shape[-1] * size >= ALIGNED, f"descriptor: box rows of {self.block_shape[-1] * size} bytes"

    @property
    def value(self) -> torch.Tensor:
        """What is described: the tensor, its rows as a matrix, or the transpose of them."""
        rows = self.base.flatten(0, -2) if len(self.shape) == 2 < self.base.ndim else self.base
        return rows if rows.ndim != 2 or self._fits(rows) else rows.t()

    def _fits(self, x: torch.Tensor) -> bool:
        lead = len(self.shape) - x.ndim
        if [1] * lead + list(x.shape) != list(self.shape):
            return False
        steps = zip(x.shape, x.stride(), self.strides[lead:], strict=True)
        return all(count == 1 or own == step for count, own, step in steps)


@dataclass(frozen=True)
class TritonLaunch:
    """One launch.

    Attributes:
        name: name of the kernel.
        grid: programs along x, y and z.
        arguments: arguments by the names of the kernel's parameters.
        options: ``num_warps``, ``num_stages``.
    """

    name: str
    grid: tuple[int, int, int]
    arguments: Mapping[str, Any]
    options: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


class TritonRecorder:
    """Replaces Triton and the GPU.

    Args:
        stand_ins: kernel name -> function that is called with the ``TritonLaunch`` in its place.
        arch: architecture of the simulated GPU.
        processors: its number of multiprocessors; launches of tensors on the CPU take it to be 2.

    Attributes:
        launches: the launches, in order.
    """

    def __init__(
        self,
        stand_ins: Mapping[str, Callable[[TritonLaunch], None]] | None = None,
        *,
        arch: str = "sm90",
        processors: int = 132,
    ) -> None:
        self.launches: list[TritonLaunch] = []
        self.stand_ins = dict(stand_ins or {})
        self.arch, self.multi_processor_count = arch, processors

    @contextmanager
    def pretended(self) -> Iterator[TritonRecorder]:
        """Replace Triton and the GPU until the block ends."""
        # PyTorch looks for Triton once, when this module is imported, and must not find this one.
        importlib.import_module("torch._dynamo")
        originals = {name: sys.modules[name] for name in (*STUBS, *_importers_of_triton()) if name in sys.modules}
        _forget(originals)
        with ExitStack() as stack:
            stack.callback(forget)
            stack.callback(_restore, originals)
            stack.enter_context(patch.dict(os.environ, TRITON_INTERPRET="0"))
            stack.enter_context(patch("rl_kernels.core.operator.arch_of", lambda *_: self.arch))
            pretended = {"_cuda_getDevice": lambda: 0, "_cuda_getCurrentRawStream": lambda index: STREAM + index}
            for name, value in pretended.items():
                stack.enter_context(patch.object(torch._C, name, value, create=True))
            stack.enter_context(patch("torch.cuda.get_device_properties", lambda *_: self))
            for name, members in self._stubs().items():
                sys.modules[name] = module_from_spec(ModuleSpec(name, None))
                vars(sys.modules[name]).update(members)
            forget()
            yield self

    def _stubs(self) -> dict[str, dict[str, Any]]:
        def jit(function: Any = None, **options: Any) -> Any:
            return _Kernel(self, function) if function is not None else lambda other: _Kernel(self, other)

        sizes = {"next_power_of_2": lambda x: 1 << (x - 1).bit_length()}
        whole = {"jit": jit, **sizes, "__path__": []}
        tools = {"TensorDescriptor": Descriptor}
        return dict(zip(STUBS, (whole, {"constexpr": Constant}, {"__path__": []}, tools), strict=True))

    def launched(self, launch: TritonLaunch) -> None:
        """Check a launch, and run its stand-in."""
        check_grid(launch.name, launch.grid)
        assert launch.options["num_warps"] in (1, 2, 4, 8, 16), f"{launch.name}: {launch.options}"
        for value in launch.arguments.values():
            if isinstance(value, Descriptor):
                # A backend may make a descriptor without calling __init__.
                value.__post_init__()
        self.launches.append(launch)
        stand_in = self.stand_ins.get(launch.name)
        if stand_in is not None:
            stand_in(launch)


class _Kernel:
    """Stands in for a function of ``triton.jit``."""

    def __init__(self, recorder: TritonRecorder, function: Callable[..., Any]) -> None:
        self.recorder, self.function = recorder, function
        self.signature = inspect.signature(function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _Compiled]:
        def launch(*args: Any, **keywords: Any) -> _Compiled:
            options = {name: value for name, value in keywords.items() if name not in self.signature.parameters}
            constants = {name: value for name, value in keywords.items() if name not in options}
            try:
                bound = self.signature.bind(*args, **constants)
            except TypeError as error:
                raise AssertionError(f"{self.function.__name__}: {error}") from error
            x, y, z = (*grid, 1, 1)[:3]
            self.recorder.launched(TritonLaunch(self.function.__name__, (x, y, z), bound.arguments, options))
            return _Compiled(self, bound.arguments, options)

        return launch


class _Compiled:
    """Stands in for a compiled kernel: valid for arguments that Triton would compile the same kernel for."""

    def __init__(self, kernel: _Kernel, arguments: Mapping[str, Any], options: Mapping[str, int]) -> None:
        self._kernel, self._options = kernel, options
        self._key = self._specialization(arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(*args: Any, stream: int) -> None:
            expected_stream = STREAM + torch._C._cuda_getDevice()
            assert stream == expected_stream, (
                f"{self._kernel.function.__name__}: launched on stream {stream}, not {expected_stream}"
            )
            arguments = self._kernel.signature.bind(*args).arguments
            assert self._specialization(arguments) == self._key, (
                f"{self._kernel.function.__name__}: wrong specialization"
            )
            self._kernel[grid](*args, **self._options)

        return launch

    def _specialization(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Return the key of a specialization: dtypes and alignment of tensors, integers that are 1 or aligned."""
        form: list[Any] = []
        for name, value in arguments.items():
            if "constexpr" in str(self._kernel.signature.parameters[name].annotation) or value is None:
                form.append(value)
            elif isinstance(value, torch.Tensor):
                form.append((value.dtype, value.data_ptr() % ALIGNED == 0))
            elif isinstance(value, int):
                form.append((value == 1, value % ALIGNED == 0))
            elif isinstance(value, Descriptor):
                form.append((value.base.dtype, value.block_shape))
            else:
                form.append(type(value))
        return form


def _importers_of_triton() -> set[str]:
    """Return our modules that hold a reference to Triton, found by their names or by what they import."""
    ours = {name: module for name, module in sys.modules.items() if name.startswith("rl_kernels.")}
    importers = {
        name for name in ours if any(part == "triton" or part.startswith("triton_") for part in name.split("."))
    }
    importers.discard(__name__)
    while True:
        more = {name for name in ours.keys() - importers if _imports_any_of(importers, ours[name])}
        if not more:
            return importers
        importers |= more


def _imports_any_of(names: set[str], module: ModuleType) -> bool:
    # A package has its modules as attributes, whether it imports them or not.
    if hasattr(module, "__path__"):
        return False
    return any(isinstance(value, ModuleType) and value.__name__ in names for value in vars(module).values())


def _forget(names: Iterable[str]) -> None:
    """Remove modules, so that they are imported anew, also by ``from package import module``."""
    for name in names:
        del sys.modules[name]
        parent, _, leaf = name.rpartition(".")
        vars(sys.modules.get(parent, ModuleType(""))).pop(leaf, None)


def _restore(originals: Mapping[str, ModuleType]) -> None:
    _forget([name for name in (*STUBS, *_importers_of_triton()) if name in sys.modules])
    sys.modules.update(originals)
    for name, module in originals.items():
        parent, _, leaf = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], leaf, module)
