"""CUDA kernels: loaded once for each GPU, and launched on PyTorch's current stream."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Lock, local
from typing import Any

import torch

from rl_kernels.core.cuda.cache import cubin_of
from rl_kernels.core.cuda.driver import checked, error_of
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.signature import MAP, Buffer, Signature
from rl_kernels.core.gpu import on_device, stream_of

SHARED = 48 * 1024
"""Bytes of static and dynamic shared memory that a block may have unless an attribute of the kernel raises them."""
CACHE_SIZE = 256
"""Largest number of launch configurations that a kernel remembers."""

_kernels: dict[tuple[Program, str, int], Kernel] = {}
_modules: dict[tuple[Program, int], Any] = {}
_lock = Lock()


def kernel(program: Program, entry: str, signature: str, device: torch.device) -> Kernel:
    """Return a kernel that is ready to be launched on a GPU; at the first call it is compiled or read, and loaded.

    Args:
        program: its source.
        entry: name of the ``extern "C"`` function.
        signature: its parameters, each a letter of ``struct`` (``P`` a pointer, ``q`` a long long, ``i`` an int, ``f``
            a float, ...) or ``T`` for a tensor map.
        device: the GPU; one without an index is the current one.

    Raises:
        CompileError: it cannot be compiled.
        CudaError: the driver cannot load it, or it has no such entry.
        ValueError: the signature does not fit the entry.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (program, entry, index)
    loaded = _kernels.get(key)
    if loaded is None:
        with _lock, on_device(index), _outside_capture():
            loaded = _kernels.get(key)
            if loaded is None:
                loaded = _kernels[key] = Kernel(_module(program, index), entry, Signature(signature), index)
    if loaded.signature.text != signature:
        raise ValueError(f"signature: {entry} was asked for with {loaded.signature.text!r} before, now {signature!r}")
    return loaded


@contextmanager
def _outside_capture() -> Iterator[None]:
    """Let this thread load a module while a stream is captured: loading is no work on a stream, so this is safe."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = checked(driver.cuThreadExchangeStreamCaptureMode(mode), "mode of capture")
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def _module(program: Program, index: int) -> Any:
    from cuda.bindings import driver

    module = _modules.get((program, index))
    if module is None:
        module = _modules[program, index] = checked(driver.cuModuleLoadData(cubin_of(program)), str(program))
    return module


class Kernel:
    """A kernel loaded on one GPU; made by ``kernel``.

    Attributes:
        entry: name of the function.
        signature: its parameters.
    """

    def __init__(self, module: Any, entry: str, signature: Signature, index: int) -> None:
        from cuda.bindings import driver

        self.entry, self.signature = entry, signature
        self._driver, self._index, self._module = driver, index, module
        self._function = checked(driver.cuModuleGetFunction(module, entry.encode()), entry)
        self._check_signature()
        static = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        self._allowed = SHARED - checked(driver.cuFuncGetAttribute(static, self._function), entry)
        self._configurations: dict[tuple[int, ...], Any] = {}
        self._thread = local()
        self._launch = driver.cuLaunchKernel

    def launch(
        self,
        grid: int | tuple[int, ...],
        block: int,
        *args: Any,
        shared: int = 0,
        pdl: bool = False,
    ) -> None:
        """Launch on the current stream of the kernel's GPU.

        Args:
            grid: blocks, one to three sizes.
            block: threads of a block.
            args: the parameters in their order; a tensor gives its address, None a null pointer. The caller ensures
                that tensors are on the GPU, and live until the kernel has run.
            shared: bytes of dynamic shared memory of a block.
            pdl: programmatic dependent launch, from sm_90 on: blocks may start while the previous kernel on the stream
                still runs, so each of their threads must call ``wait_for_prerequisites`` (``ptx.cuh``) before it
                accesses memory.

        Raises:
            TypeError: the arguments do not fit the signature.
            CudaError: the driver refused the launch.
        """
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        try:
            numbers = self.signature.numbers(args)
        except IndexError as error:
            raise self._signature_error(error) from error
        self.start((x, y, z), block, shared, pdl, numbers)

    def start(
        self, grid: tuple[int, int, int], block: int, shared: int, pdl: bool, numbers: Sequence[int | float | bytes]
    ) -> None:
        """Launch like ``launch``, but faster: parameters are numbers already, such as a tensor's address."""
        x, y, z = grid
        try:
            buffer = self._thread.buffer
        except AttributeError:
            buffer = self._thread.buffer = Buffer(self.signature)
        try:
            buffer.fill(numbers)
        except (struct.error, TypeError) as error:
            raise self._signature_error(error) from error
        if shared > self._allowed:
            self._raise_shared_limit(shared)
        with on_device(self._index):
            stream = stream_of(self._index)
            if pdl:
                configuration = self._configuration(x, y, z, block, shared, stream)
                launched = self._driver.cuLaunchKernelEx(configuration, self._function, 0, buffer.address)
            else:
                launched = self._launch(self._function, x, y, z, block, 1, 1, shared, stream, 0, buffer.address)
        if launched[0]:
            sizes = f"grid {(x, y, z)}, block {block}, shared {shared}"
            raise error_of(launched[0], f"{self.entry}: {sizes}")

    def _signature_error(self, error: Exception) -> TypeError:
        return TypeError(f"{self.entry}: the arguments do not fit {self.signature.text!r}: {error}")

    def _check_signature(self) -> None:
        """Compare the signature with the compiled kernel: a misplaced argument would be read as garbage."""
        compiled = []
        for index in count():
            try:
                status, *place = self._driver.cuFuncGetParamInfo(self._function, index)
            except RuntimeError:
                # Drivers before CUDA 12.4 do not report parameters.
                return
            if status:
                break
            compiled.append(tuple(place))
        if MAP in self.signature.text and [size for _, size in compiled] == [size for _, size in self.signature.places]:
            self.signature = Signature(self.signature.text, [offset for offset, _ in compiled])
        if tuple(compiled) != self.signature.places:
            ours = f"{self.signature.text!r} has {list(self.signature.places)}"
            raise ValueError(f"signature: {ours}, {self.entry} has {compiled} (offset and size of each parameter)")

    def _raise_shared_limit(self, shared: int) -> None:
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with on_device(self._index):
            set_to = self._driver.cuFuncSetAttribute(self._function, attribute, shared)
        checked(set_to, f"{self.entry}: {shared} bytes of dynamic shared memory")
        self._allowed = shared

    def _configuration(self, *key: int) -> Any:
        """Return the configuration of a programmatic dependent launch."""
        configuration = self._configurations.get(key)
        if configuration is None:
            if len(self._configurations) >= CACHE_SIZE:
                self._configurations.clear()
            configuration = self._configurations[key] = self._new_configuration(*key)
        return configuration

    def _new_configuration(self, x: int, y: int, z: int, block: int, shared: int, stream: int) -> Any:
        configuration = self._driver.CUlaunchConfig()
        configuration.gridDimX, configuration.gridDimY, configuration.gridDimZ = x, y, z
        configuration.blockDimX, configuration.blockDimY, configuration.blockDimZ = block, 1, 1
        configuration.sharedMemBytes, configuration.hStream = shared, stream
        early = self._driver.CUlaunchAttribute()
        early.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        configuration.attrs, configuration.numAttrs = [early], 1
        return configuration
