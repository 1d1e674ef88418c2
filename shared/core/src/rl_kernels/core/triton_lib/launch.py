"""Where a Triton kernel can run, and how it is launched there; imports no Triton, so that anyone may ask."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from rl_kernels.core.gpu import current, stream_of
from rl_kernels.core.operator import INVARIANT, Backend, Call, no_limits

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
"""Triton reads it when it is imported, so it is read once here too."""
INSTALLED = find_spec("triton") is not None

ALIGNMENT = 256
"""More than the alignment that any Triton looks at; PyTorch's own allocations have it."""
PLAIN = frozenset({int, float, bool, type(None)})
"""Types of arguments that are a key as they are; all others are tensors, or descriptors of one."""
KEPT = 4096
"""Launches whose compiled kernel is remembered."""

_compiled: dict[tuple[Any, ...], tuple[Any, Any]] = {}


def why_not(call: Call) -> str | None:
    """Say why Triton cannot run a call, or return None."""
    if not INSTALLED:
        return "Triton is not installed: pip install 'rl-kernels-core[triton]'"
    if call.dtype == torch.float64:
        return "Triton kernels work in FP32; FP64 is for the native backend"
    if call.device.type == "cpu" and not INTERPRETED:
        return "on a CPU it runs under TRITON_INTERPRET=1 only"
    return None


def triton_backend(module: str, limits: Callable[[Call], str | None] = no_limits) -> Backend:
    """Return the backend ``triton`` of an operator; on a CPU, where it is interpreted, it runs by name only.

    Args:
        module: import path.
        limits: of the operator's own kernels: ``call -> reason``; why this call is beyond them, or None.
    """

    def reason(call: Call) -> str | None:
        return why_not(call) or limits(call)

    return Backend("triton", module, {"cuda": INVARIANT, "cpu": INVARIANT}, reason, by_name=frozenset({"cpu"}))


def ceil_div(x: int, y: int) -> int:
    """Return x by y, rounded up, for grids: on the host Triton's own takes a microsecond or three."""
    return -(-x // y)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    numbers: tuple[float | bool | None, ...] = (),
    num_warps: int,
    **options: int,
) -> None:
    """Launch a jitted kernel on the current device, as ``kernel[grid](*args, num_warps=num_warps, **options)`` does.

    Arguments that came before find what Triton compiled for them by a key of their own, which leaves out Triton's look
    at each of them: on the host that is most of a launch. The key is finer than anything that Triton specializes on:
    numbers and constants by value, tensors by dtype and by where their address lies in 256 bytes, descriptors by dtype
    and by what they bring at once. The launch itself is ``compiled[grid](*args)``, the form of Triton's own tutorials,
    on a stream that is given.

    Args:
        kernel: of ``triton.jit``.
        grid: one to three sizes.
        args: all parameters of the kernel in their order, constants too; a number's type never varies at its place.
        numbers: those behind ``args``, none of them a tensor: as one tuple they are quicker to look up.
        num_warps: of a program.
        options: others of the compiler, ``num_stages`` for one.
    """
    if INTERPRETED or torch.version.hip is not None:
        # ROCm specializes on the sizes of tensors too.
        kernel[grid](*args, *numbers, num_warps=num_warps, **options)
        return
    forms = [x if type(x) in PLAIN else _form(x) for x in args]
    device = current()
    key = (id(kernel), device, num_warps, *options.values(), numbers, *forms)
    found = _compiled.get(key)
    if found is not None:
        sizes = (*grid, 1, 1)
        # Triton would ask for device and stream, which takes longer.
        found[1][sizes](*args, *numbers, stream=stream_of(device))
        return
    compiled = kernel[grid](*args, *numbers, num_warps=num_warps, **options)
    if len(_compiled) >= KEPT:
        _compiled.clear()
    # A hook of Triton's may have kept it from compiling. With the kernel beside it, no other one can get its id.
    if compiled is not None:
        _compiled[key] = kernel, compiled


def _form(x: Any) -> tuple[Any, ...]:
    """Return what a kernel is compiled for: of a tensor, or of a descriptor, which Triton's own class is."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % ALIGNMENT
    return x.base.dtype, *x.block_shape


class Launch:
    """A launch that is made again and again: kernel, grid and numbers stay, and of tensors all but where they lie.

    That a place always holds a tensor, of one dtype and on one GPU, or always a descriptor, or None, is the caller's to
    see to; what Triton compiled is then found by the addresses alone.

    Args:
        kernel: of ``triton.jit``.
        grid: one to three sizes.
        numbers: the parameters behind the tensors, constants too.
        num_warps: of a program.
        options: others of the compiler.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[float | bool | None, ...],
        *,
        num_warps: int,
        **options: int,
    ) -> None:
        self._kernel, self._grid, self._numbers = kernel, grid, numbers
        self._options = {"num_warps": num_warps, **options}
        self._runs: dict[tuple[int, ...], Callable[..., None]] = {}
        self._tensors: tuple[int, ...] | None = None

    def __call__(self, *args: Any) -> None:
        """Launch with these tensors, descriptors and Nones, the parameters before the numbers."""
        if self._tensors is None:
            self._tensors = tuple(place for place, x in enumerate(args) if isinstance(x, torch.Tensor))
        key = tuple([args[place].data_ptr() % ALIGNMENT for place in self._tensors])
        run = self._runs.get(key)
        if run is not None:
            run(*args, *self._numbers, stream=stream_of(current()))
            return
        compiled = self._kernel[self._grid](*args, *self._numbers, **self._options)
        # As in launch: what is interpreted, or specialized on more, is not kept.
        if not INTERPRETED and torch.version.hip is None and compiled is not None:
            if len(self._runs) >= KEPT:
                self._runs.clear()
            sizes = (*self._grid, 1, 1)
            self._runs[key] = compiled[sizes]
