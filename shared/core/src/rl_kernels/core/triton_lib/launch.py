"""Support check and fast launch of Triton kernels; imports no Triton, so it works where Triton is missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from rl_kernels.core.gpu import current, stream_of
from rl_kernels.core.operator import INVARIANT, Backend, Call, no_limits

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
"""Whether Triton interprets kernels. Triton reads the variable when it is imported, so it is read once here too."""
INSTALLED = find_spec("triton") is not None

ALIGNMENT = 256
"""At least every alignment that Triton specializes on; PyTorch's own allocations have it."""
PLAIN = frozenset({int, float, bool, type(None)})
"""Types of arguments that go into a key as they are; all other arguments are tensors or tensor descriptors."""
CACHE_SIZE = 4096
"""Largest number of launches whose compiled kernel is remembered."""

direct = INTERPRETED or torch.version.hip is not None
"""Whether Triton inspects each launch itself: on ROCm it specializes on the sizes of tensors too."""
_compiled: dict[tuple[Any, ...], tuple[Any, Any]] = {}


def why_not(call: Call) -> str | None:
    """Say why Triton cannot run a call, or return None."""
    if not INSTALLED:
        return "Triton is not installed: pip install triton"
    if call.dtype == torch.float64:
        return "Triton kernels work in FP32; FP64 is for the native backend"
    if call.device.type == "cpu" and not INTERPRETED:
        return "on a CPU it runs under TRITON_INTERPRET=1 only"
    return None


def triton_backend(module: str, limits: Callable[[Call], str | None] = no_limits) -> Backend:
    """Return the backend ``triton`` of an operator; on a CPU, where it is interpreted, it runs by name only.

    Args:
        module: import path.
        limits: ``call -> reason``: why the operator's kernels cannot run this call, or None.
    """

    def reason(call: Call) -> str | None:
        return why_not(call) or limits(call)

    return Backend("triton", module, {"cuda": INVARIANT, "cpu": INVARIANT}, reason, by_name=frozenset({"cpu"}))


def ceil_div(x: int, y: int) -> int:
    """Return x / y rounded up, for grids; Triton's own takes one to three microseconds on the host."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """Return the smallest power of 2 that is not below x >= 1; faster than Triton's own, as ``ceil_div`` is."""
    return 1 << (x - 1).bit_length()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    numbers: tuple[float | bool | None, ...] = (),
    num_warps: int,
    **options: int,
) -> None:
    """Launch a jitted kernel on the current device, as ``kernel[grid](*args, num_warps=num_warps, **options)`` does.

    For arguments like those of an earlier call, the compiled kernel is found by a key of our own. This skips Triton's
    inspection of each argument, which is most of a launch on the host. The key is finer than anything that Triton
    specializes on: numbers and constants by value, tensors by dtype and address modulo 256, descriptors by dtype and
    block shape. The launch itself is ``compiled[grid](*args)``, the form of Triton's own tutorials, with the stream
    passed in.

    Args:
        kernel: of ``triton.jit``.
        grid: one to three sizes.
        args: all parameters of the kernel in their order, constants too; the type of a number must not vary by call.
        numbers: parameters after ``args``, none of them a tensor; one tuple is faster to look up.
        num_warps: warps of a program.
        options: other options of the compiler, such as ``num_stages``.
    """
    if direct:
        kernel[grid](*args, *numbers, num_warps=num_warps, **options)
        return
    specializations = [x if type(x) in PLAIN else _specialization(x) for x in args]
    device = current()
    key = (id(kernel), device, num_warps, *options.values(), numbers, *specializations)
    cached = _compiled.get(key)
    if cached is not None:
        sizes = (*grid, 1, 1)
        # Passed in, because Triton's own look-up of device and stream takes longer.
        cached[1][sizes](*args, *numbers, stream=stream_of(device))
        return
    compiled = kernel[grid](*args, *numbers, num_warps=num_warps, **options)
    if len(_compiled) >= CACHE_SIZE:
        _compiled.clear()
    # None if a Triton hook kept it from compiling. The kernel is kept too, so that its id is not reused.
    if compiled is not None:
        _compiled[key] = kernel, compiled


def _runner(compiled: Any, sizes: tuple[int, ...]) -> Callable[..., None]:
    """Return ``compiled[sizes]``, called with a stream.

    Triton's own prepares and calls hooks in each launch, also if a profiler has set none.
    """
    observed = compiled[sizes]
    if not all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
        return observed
    from triton import knobs

    run, hooks, grid = compiled.run, knobs.runtime, sizes[:3]
    fixed = compiled.function, compiled.packed_metadata, None, None, None

    def launch(*args: Any, stream: int) -> None:
        if _is_set(hooks.launch_enter_hook) or _is_set(hooks.launch_exit_hook):
            observed(*args, stream=stream)
        else:
            run(*grid, stream, *fixed, *args)

    return launch


def _is_set(hook: Any) -> bool:
    """Say whether a hook does anything; one that nobody has set is None or an empty chain."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _specialization(x: Any) -> tuple[Any, ...]:
    """Return the properties of a tensor, or of a descriptor of Triton's class, on which a kernel is specialized."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % ALIGNMENT
    return x.base.dtype, *x.block_shape


class Launch:
    """A launch that is repeated with the same kernel, grid and numbers; only addresses of tensors and floats vary.

    The caller must pass the same kind of argument at each position in every call: a tensor of one dtype on one GPU, a
    descriptor, None, a float, or one and the same integer. The compiled kernel is then found by the addresses alone.

    Args:
        kernel: of ``triton.jit``.
        grid: one to three sizes.
        numbers: the parameters after the tensors, constants too.
        num_warps: warps of a program.
        options: other options of the compiler.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[float | bool | str | None, ...],
        *,
        num_warps: int,
        **options: int,
    ) -> None:
        self._kernel, self._grid, self._numbers = kernel, grid, numbers
        self._options = {"num_warps": num_warps, **options}
        self._runs: dict[tuple[int, ...], Callable[..., None]] = {}
        self._tensors: tuple[int, ...] | None = None

    def __call__(self, *args: Any) -> None:
        """Launch with these arguments: the parameters before ``numbers``."""
        if self._tensors is None:
            self._tensors = tuple(place for place, x in enumerate(args) if isinstance(x, torch.Tensor))
        key = tuple([args[place].data_ptr() % ALIGNMENT for place in self._tensors])
        run = self._runs.get(key)
        if run is not None:
            run(*args, *self._numbers, stream=stream_of(current()))
            return
        compiled = self._kernel[self._grid](*args, *self._numbers, **self._options)
        if not direct and compiled is not None:
            if len(self._runs) >= CACHE_SIZE:
                self._runs.clear()
            self._runs[key] = _runner(compiled, (*self._grid, 1, 1))
