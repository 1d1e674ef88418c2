"""Record the launches of a CUDA backend without a GPU, to test its host code.

``Recorder`` replaces the GPU in the modules of a backend. It checks every launch against the limits of the hardware,
and names its arguments as the kernel's source does. A few lines of PyTorch may stand in for the kernel: they see only
the arguments, so a wrong argument gives a wrong result::

    recorder = Recorder({"forward_rows": stand_in})
    with recorder.watching("rl_kernels.fused_logp.backends.cuda.backend"):
        fused_logp_on_the_cpu(...)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from rl_kernels.core.calls import forget
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.signature import MAP_SIZE, Buffer, Signature
from rl_kernels.core.cuda.tensor_map import DIMS, described_view
from rl_kernels.core.testing.parameters import parameters_of, signature_of

MOST_THREADS, MOST_SHARED = 1024, 227 << 10
"""Threads and bytes of shared memory that a block may have on Hopper."""
COPIED = 16
"""Alignment, in bytes, of addresses, rows and boxes of a tensor map."""
LONGEST = 256
"""Elements that a box may have along each dimension."""


class Box(NamedTuple):
    """Stands in for a tensor map: the tensor that it describes, and its box."""

    tensor: torch.Tensor
    box: tuple[int, ...]
    swizzle: int
    promotion: int


class Address(int):
    """The address of a tensor, from which a recorder finds the tensor."""

    tensor: torch.Tensor


def address_of(tensor: torch.Tensor) -> Address:
    """Stand in for ``torch.Tensor.data_ptr``."""
    address = Address(torch._C.TensorBase.data_ptr(tensor))
    address.tensor = tensor
    return address


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
        program: the compiled program.
        entry: name of the kernel.
        grid: blocks along x, y and z.
        block: threads of a block.
        shared: bytes of dynamic shared memory.
        pdl: whether it may start while the previous kernel runs.
        arguments: arguments by their names in the kernel's source; members of a struct have names of their own.
    """

    program: Program
    entry: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    pdl: bool
    arguments: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def constants(self) -> dict[str, int]:
        """The defines of the program."""
        return dict(self.program.defines)


class Recorder:
    """Replaces the GPU.

    Args:
        stand_ins: kernel name -> function that is called with the ``Launch`` in its place.
        arch: architecture of the simulated GPU.
        processors: its number of multiprocessors.

    Attributes:
        launches: the launches, in order.
    """

    def __init__(
        self,
        stand_ins: Mapping[str, Callable[[Launch], None]] | None = None,
        *,
        arch: str = "sm90",
        processors: int = 132,
    ) -> None:
        self.launches: list[Launch] = []
        self.stand_ins = dict(stand_ins or {})
        self.arch, self.processors = arch, processors

    @contextmanager
    def watching(self, *modules: str) -> Iterator[Recorder]:
        """Replace what these modules import to use the GPU, until the block ends."""
        places = {
            "kernel": self._kernel,
            "tensor_map": tensor_map,
            "processors": lambda *_: self.processors,
            "arch_of": lambda *_: self.arch,
        }
        with ExitStack() as stack:
            stack.callback(forget)
            stack.enter_context(patch.object(torch.Tensor, "data_ptr", address_of))
            for module in map(importlib.import_module, modules):
                for name, value in places.items():
                    if hasattr(module, name):
                        stack.enter_context(patch.object(module, name, value))
            forget()
            yield self

    def _kernel(self, program: Program, entry: str, signature: str, device: torch.device) -> _Recorded:
        expected = signature_of(program, entry)
        assert signature == expected, f"{entry}: the signature is {signature!r}, the source has {expected!r}"
        return _Recorded(self, program, entry, signature)

    def launched(self, launch: Launch) -> None:
        """Check a launch, and run its stand-in."""
        _check(launch)
        self.launches.append(launch)
        stand_in = self.stand_ins.get(launch.entry)
        if stand_in is not None:
            stand_in(launch)


class _Recorded:
    """A kernel of the simulated GPU."""

    def __init__(self, recorder: Recorder, program: Program, entry: str, signature: str) -> None:
        self._recorder, self._program, self._entry, self._signature = recorder, program, entry, signature

    def launch(self, grid: int | tuple[int, ...], block: int, *args: Any, shared: int = 0, pdl: bool = False) -> None:
        """Record a launch."""
        try:
            maps = [bytes(MAP_SIZE) if isinstance(arg, Box) else arg for arg in args]
            signature = Signature(self._signature)
            Buffer(signature).fill(signature.numbers(tuple(maps)))
        except Exception as error:
            raise AssertionError(f"{self._entry}: arguments do not fit {self._signature!r}: {error}") from error
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        names = [parameter.name for parameter in parameters_of(self._program, self._entry)]
        named = dict(zip(names, args, strict=True))
        self._recorder.launched(Launch(self._program, self._entry, (x, y, z), block, shared, pdl, named))

    def start(self, grid: tuple[int, int, int], block: int, shared: int, pdl: bool, numbers: Sequence[Any]) -> None:
        """Record a launch whose arguments are numbers: a tensor's address gives the tensor, 0 a null pointer."""
        assert not any(isinstance(x, torch.Tensor) for x in numbers), f"{self._entry}: a tensor among numbers"
        pointers = Signature(self._signature).pointers
        args = [
            value.tensor if isinstance(value, Address) else None if place in pointers and value == 0 else value
            for place, value in enumerate(numbers)
        ]
        self.launch(grid, block, *args, shared=shared, pdl=pdl)


def tensor_map(
    tensor: torch.Tensor,
    box: tuple[int, ...],
    *,
    swizzle: int = 0,
    promotion: int = 256,
    transposed: bool = False,
    strides: tuple[int, ...] | None = None,
) -> Box:
    """Stand in for ``core.cuda.tensor_map``; checks what TMA requires of the tensor."""
    tensor = described_view(tensor, transposed, strides)
    size = tensor.element_size()
    assert tensor.ndim in DIMS, f"tensor map: {tensor.ndim} dims"
    assert tensor.numel(), "tensor map: empty tensor"
    assert tensor.stride(-1) == 1, f"tensor map: expected column stride 1, got {tensor.stride(-1)}"
    assert tensor.data_ptr() % COPIED == 0, "tensor map: address not a multiple of 16 bytes"
    outer = list(zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True))
    assert all(step and step * size % COPIED == 0 for _, step in outer), "tensor map: stride not a multiple of 16 bytes"
    assert all(step >= tensor.shape[-1] for count, step in outer if count > 1), "tensor map: rows overlap"
    assert len(box) == tensor.ndim, f"tensor map: box of {len(box)} dims"
    assert all(1 <= count <= LONGEST for count in box), f"tensor map: sides of the box out of range: {box}"
    assert box[-1] * size % COPIED == 0, f"tensor map: box rows of {box[-1] * size} bytes"
    assert not swizzle or box[-1] * size <= swizzle, "tensor map: box rows longer than the swizzle"
    assert swizzle in (0, 32, 64, 128), f"tensor map: unknown swizzle {swizzle}"
    assert promotion in (64, 128, 256), f"tensor map: unknown promotion {promotion}"
    return Box(tensor, box, swizzle, promotion)


def _check(launch: Launch) -> None:
    """Check a launch against the limits of the hardware, and its pointers against the types in the source."""
    name = launch.entry
    check_grid(name, launch.grid)
    assert 0 < launch.block <= MOST_THREADS, f"{name}: {launch.block} threads"
    assert launch.block % 32 == 0, f"{name}: {launch.block} threads: not a multiple of 32"
    assert 0 <= launch.shared <= MOST_SHARED, f"{name}: {launch.shared} bytes of shared memory"
    for parameter in parameters_of(launch.program, name):
        value = launch.arguments[parameter.name]
        if parameter.points_to is None or value is None:
            continue
        assert value.dtype == parameter.points_to, f"{name}: {parameter.name} points to {value.dtype}"
        # A kernel gets no strides for a pointer with a type: it reads element i at offset i.
        assert value.is_contiguous(), f"{name}: {parameter.name} has strides {value.stride()}"


def check_grid(name: str, grid: tuple[int, int, int]) -> None:
    """Check the blocks of a launch along each dimension against the limits of the hardware."""
    for blocks, most in zip(grid, (1 << 31, 1 << 16, 1 << 16), strict=True):
        assert 0 < blocks < most, f"{name}: grid out of range: {grid}"


def strided(base: torch.Tensor, shape: tuple[int, int], strides: tuple[int, int]) -> torch.Tensor:
    """Return the matrix that begins at ``base``, with strides in bytes; it must fit into the storage."""
    size = base.element_size()
    assert not any(stride % size for stride in strides), f"strides of {strides} bytes for elements of {size} bytes"
    try:
        return base.as_strided(shape, tuple(stride // size for stride in strides), base.storage_offset())
    except RuntimeError as error:
        raise AssertionError(f"{shape} with strides of {strides} bytes does not fit into the tensor") from error


def vector(base: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` contiguous numbers that a pointer without a type points to."""
    return strided(base, (1, count), (0, base.element_size()))[0]
