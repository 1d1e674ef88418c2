"""What a launch gives to the driver, with a driver that only takes note; the GPU itself is in test_cuda_gpu.py."""

import ctypes
import struct
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.core.cuda import launch as module
from rl_kernels.core.cuda.driver import CudaError
from rl_kernels.core.cuda.program import Program

PROGRAM = Program("toy_kernels", "toy.cu", "sm_90a")
GPU = torch.device("cuda", 0)


def packed(address, size):
    """Read what a launch was given: the bytes of the parameters."""
    words = (ctypes.c_void_p * 5).from_address(address)
    assert (words[0], words[2], words[4]) == (1, 2, None)
    assert ctypes.c_size_t.from_address(words[3]).value == size
    return ctypes.string_at(words[1], size)


class Names:
    """An enumeration that knows every name."""

    def __getattr__(self, name):
        return name


class Driver:
    """Takes note of calls; ``refuse`` names the one that fails, ``places`` are the parameters of its kernel."""

    places = ((0, 8), (8, 8), (16, 4))
    refuse = ""
    CUfunction_attribute = CUstreamCaptureMode = CUlaunchAttributeID = Names()
    CUlaunchConfig = SimpleNamespace

    def __init__(self):
        self.calls = []

    def CUlaunchAttribute(self):
        return SimpleNamespace(value=SimpleNamespace())

    def cuFuncGetParamInfo(self, function, place):
        return (0, *self.places[place]) if place < len(self.places) else (1, 0, 0)

    def cuGetErrorName(self, status):
        return 0, b"CUDA_ERROR_TOY"

    def cuGetErrorString(self, status):
        return 0, b"toy trouble"

    def cuFuncGetAttribute(self, attribute, function):
        return 0, 1024

    def __getattr__(self, name):
        def call(*args):
            extra = (packed(args[-1], 20),) if name.startswith("cuLaunch") else ()
            self.calls.append((name, *args[:-1], *extra) if extra else (name, *args))
            return 7 if name == self.refuse else 0, f"{name}-result"

        return call

    def named(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def driver(make_module, monkeypatch):
    made = Driver()
    make_module("cuda")
    make_module("cuda.bindings", driver=made)
    monkeypatch.setattr(module, "_kernels", {})
    monkeypatch.setattr(module, "_modules", {})
    monkeypatch.setattr(module, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(module, "cubin_of", lambda program: b"cubin")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 40 + index, raising=False)
    return made


@pytest.fixture
def kernel(driver):
    return module.kernel(PROGRAM, "toy", "Pqi", GPU)


def test_loaded_once_for_each_device(driver):
    first = module.kernel(PROGRAM, "toy", "Pqi", GPU)
    assert module.kernel(PROGRAM, "toy", "Pqi", GPU) is first
    assert module.kernel(PROGRAM, "other", "Pqi", GPU) is not first
    assert module.kernel(PROGRAM, "toy", "Pqi", torch.device("cuda", 1)) is not first
    assert driver.named("cuModuleLoadData") == [(b"cubin",)] * 2
    modes = driver.named("cuThreadExchangeStreamCaptureMode")
    assert modes[:2] == [("CU_STREAM_CAPTURE_MODE_RELAXED",), ("cuThreadExchangeStreamCaptureMode-result",)]


def test_a_launch(kernel, driver):
    x = torch.zeros(4)
    kernel.launch(5, 128, x, 2**40, -1)
    kernel.launch((2, 3), 64, None, 7, 8, shared=47 * 1024)
    function = "cuModuleGetFunction-result"
    assert driver.named("cuLaunchKernel") == [
        (function, 5, 1, 1, 128, 1, 1, 0, 40, 0, struct.pack("Pqi", x.data_ptr(), 2**40, -1)),
        (function, 2, 3, 1, 64, 1, 1, 47 * 1024, 40, 0, struct.pack("Pqi", 0, 7, 8)),
    ]
    assert not driver.named("cuFuncSetAttribute")


def test_more_shared_memory_is_allowed_once(kernel, driver):
    # 1 KiB of 48 is static.
    for shared in (48 * 1024, 48 * 1024, 100 * 1024, 64 * 1024):
        kernel.launch(1, 32, None, 0, 0, shared=shared)
    assert [size for *_, size in driver.named("cuFuncSetAttribute")] == [48 * 1024, 100 * 1024]


def test_a_launch_that_may_begin_early(kernel, driver):
    for _ in range(2):
        kernel.launch(4, 64, None, 1, 2, shared=16, pdl=True)
    kernel.launch(4, 64, None, 1, 2)
    assert len(driver.named("cuLaunchKernel")) == 1
    (first, *_), (second, *_) = driver.named("cuLaunchKernelEx")
    assert first is second
    assert (first.gridDimX, first.gridDimY, first.blockDimX, first.sharedMemBytes, first.hStream) == (4, 1, 64, 16, 40)
    (attribute,) = first.attrs
    assert attribute.id == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    assert attribute.value.programmaticStreamSerializationAllowed == 1


WRONG = (None, 1), (None, 1, 2, 3), (), (None, 1.5, 2), (None, torch.zeros(1), 2), ("x", 1, 2), (None, 1, 2**31)


def test_arguments_that_do_not_fit(kernel):
    for args in WRONG:
        with pytest.raises(TypeError, match="toy: the arguments do not fit 'Pqi'"):
            kernel.launch(1, 32, *args)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("cuLaunchKernel", "toy: grid (3, 2, 1), block 32, shared 8: CUDA_ERROR_TOY (toy trouble)"),
        ("cuModuleLoadData", "toy_kernels/toy.cu for sm_90a: CUDA_ERROR_TOY"),
        ("cuModuleGetFunction", "toy: CUDA_ERROR_TOY"),
    ],
)
def test_what_the_driver_refuses(call, words, driver):
    driver.refuse = call
    with pytest.raises(CudaError) as caught:
        module.kernel(PROGRAM, "toy", "Pqi", GPU).launch((3, 2), 32, None, 1, 2, shared=8)
    assert words in str(caught.value)


def test_memory_that_is_not_there_is_asked_for_again(kernel, driver):
    driver.refuse = "cuFuncSetAttribute"
    for _ in range(2):
        with pytest.raises(CudaError, match="999999 bytes of dynamic shared memory: CUDA_ERROR_TOY"):
            kernel.launch(1, 32, None, 1, 2, shared=999999)


def test_a_signature_is_that_of_the_kernel_and_there_is_one(driver):
    for signature in ("Pq", "Pqii", "Pqq", "PiP", "P"):
        with pytest.raises(ValueError, match=r"signature: .* toy has \[\(0, 8\), \(8, 8\), \(16, 4\)\]"):
            module.kernel(PROGRAM, "toy", signature, GPU)
    module.kernel(PROGRAM, "toy", "Pqi", GPU)
    with pytest.raises(ValueError, match="signature: toy was asked for with 'Pqi' before, now 'Pqf'"):
        module.kernel(PROGRAM, "toy", "Pqf", GPU)


def test_a_driver_that_cannot_tell_the_parameters(driver):
    def unknown(*_):
        raise RuntimeError('Function "cuFuncGetParamInfo" not found')

    driver.cuFuncGetParamInfo = unknown
    assert module.kernel(PROGRAM, "toy", "Pqi", GPU).entry == "toy"
