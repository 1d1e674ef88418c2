"""Where a CUDA C++ backend can run: reasons with what to do, asked before anything is compiled."""

from types import SimpleNamespace

import pytest
import torch

from rl_kernels.core.cuda import cache, toolchain, where
from rl_kernels.core.cuda.where import cuda_backend, target_of
from rl_kernels.core.operator import Call

H200 = Call(torch.device("cuda"), torch.bfloat16, "sm90")


def call(arch="sm90", dtype=torch.bfloat16):
    return Call(torch.device("cuda"), dtype, arch)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Play a machine where everything is there."""
    monkeypatch.setattr(where, "_missing", {})
    monkeypatch.setattr(toolchain, "bindings_version", lambda: "13.0.3")
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(toolchain, "targets", lambda: frozenset({80, 89, 90, 100}))
    monkeypatch.setattr(toolchain, "driver_major", lambda: 13)
    monkeypatch.setattr(cache, "ships", lambda package, arch: False)


def gone(*_):
    raise OSError("libnvrtc.so.13 is not there")


NOWHERE = {
    "hip": (torch.version, "hip", "6.4"),
    "bindings": (toolchain, "bindings_version", lambda: None),
    "nvrtc": (toolchain, "nvrtc_version", gone),
    "driver": (toolchain, "driver_major", lambda: 12),
}


@pytest.mark.parametrize(
    ("given", "archs", "change", "reason"),
    [
        (call(), "sm_90", None, None),
        (call("sm100"), "sm_80+", None, None),
        (call("sm80"), "sm_80+", None, None),
        (call(), "sm_90", "hip", "CUDA C++ kernels are for NVIDIA GPUs, this PyTorch is for ROCm"),
        (call("gfx942"), "sm_80+", None, "CUDA C++ kernels are for NVIDIA GPUs, this is gfx942"),
        (call(dtype=torch.float64), "sm_90", None, "FP64 is for the native backend"),
        (call("sm89"), "sm_90", None, "needs sm_90, this is sm_89"),
        (call("sm100"), "sm_90", None, "has kernels for sm_90 alone, this is sm_100"),
        (call("sm75"), "sm_80+", None, "needs sm_80 or newer, this is sm_75"),
        (call(), "sm_90", "bindings", "cuda-bindings is not installed: pip install cuda-bindings"),
        (call(), "sm_90", "nvrtc", "libnvrtc.so.13 is not there): pip install 'nvidia-cuda-nvrtc==13.*'"),
        (call(), "sm_90", "driver", "the driver knows CUDA 12, NVRTC is that of CUDA 13.0: update the driver, or"),
        (call("sm130"), "sm_80+", None, "NVRTC of CUDA 13.0 cannot compile for sm_130: install a newer one"),
        (Call(torch.device("cpu"), torch.float32, "cpu"), "sm_80+", None, "runs on cuda, but the tensors are on cpu"),
    ],
)
def test_reasons(given, archs, change, reason, monkeypatch):
    if change:
        monkeypatch.setattr(*NOWHERE[change])
    found = cuda_backend("cuda-toy", "toy.cuda_backend", archs=archs).why_not(given)
    assert found is None if reason is None else reason in found


def test_reasons_come_in_order(monkeypatch):
    backend = cuda_backend("cuda-toy", "toy.cuda_backend", archs="sm_90", limits=lambda call: "too wide")
    assert backend.why_not(H200) == "too wide"
    for change, words in (("nvrtc", "NVRTC cannot be loaded"), ("bindings", "not installed")):
        monkeypatch.setattr(*NOWHERE[change])
        where._missing.clear()
        assert words in backend.why_not(H200)
    assert "this is sm_80" in backend.why_not(call("sm80"))
    assert "FP64" in backend.why_not(call("sm80", torch.float64))
    monkeypatch.setattr(*NOWHERE["hip"])
    assert "ROCm" in backend.why_not(call("sm80", torch.float64))


def test_cubins_of_the_wheel_need_no_nvrtc_if_every_package_with_sources_ships_them(monkeypatch):
    monkeypatch.setattr(*NOWHERE["nvrtc"])
    monkeypatch.setattr(cache, "ships", lambda package, arch: (package, arch) == ("toy", "sm_90a"))
    assert cuda_backend("cuda-sm90", "toy.cuda_backend", archs="sm_90").why_not(H200) is None
    assert "NVRTC" in cuda_backend("cuda-generic", "toy.cuda_backend", archs="sm_80+").why_not(H200)
    shipping = {"core"}
    monkeypatch.setattr(cache, "ships", lambda package, arch: package in shipping)
    where._missing.clear()
    own, shared, both = (
        cuda_backend("cuda-sm90", "toy.cuda_backend", archs="sm_90", sources=sources)
        for sources in ([], ["core"], ["toy", "core"])
    )
    assert shared.why_not(H200) is None
    assert "NVRTC" in own.why_not(H200)
    assert "NVRTC" in both.why_not(H200)
    shipping.add("toy")
    where._missing.clear()
    assert both.why_not(H200) is None


def test_targets():
    for archs in ("90", "sm_90a", "sm90", ""):
        with pytest.raises(ValueError, match="archs: expected sm_NUMBER"):
            cuda_backend("cuda-toy", "toy.cuda_backend", archs=archs)
    assert target_of("sm90", exact=True) == "sm_90a"
    assert target_of("sm120", exact=False) == "sm_120"


def test_the_major_version_of_the_driver_is_asked_for_where_there_is_a_gpu(monkeypatch, make_module):
    monkeypatch.undo()
    make_module("cuda")
    # Without a GPU, whatever is called is not there, and would raise.
    for driver, major in ((SimpleNamespace(), None), (SimpleNamespace(cuDriverGetVersion=lambda: (0, 12080)), 12)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda major=major: major is not None)
        make_module("cuda.bindings", driver=driver)
        toolchain.driver_major.cache_clear()
        assert toolchain.driver_major() == major
        toolchain.driver_major.cache_clear()


def test_a_missing_library_is_a_reason_and_no_traceback(monkeypatch, make_module):
    monkeypatch.undo()

    def nvrtc_version():
        raise RuntimeError("Failure finding libnvrtc.so\nsecond line")

    make_module("cuda")
    make_module("cuda.bindings", nvrtc=SimpleNamespace(nvrtcVersion=nvrtc_version))
    monkeypatch.setattr(toolchain, "bindings_version", lambda: "12.9.1")
    toolchain.nvrtc_version.cache_clear()
    expected = "NVRTC cannot be loaded (Failure finding libnvrtc.so): pip install nvidia-cuda-nvrtc-cu12"
    assert toolchain.why_no_compiler() == expected


def test_asked_while_a_call_is_traced():
    backend = cuda_backend("cuda-toy", "toy.cuda_backend", archs="sm_90")

    def add(x):
        return x + (1 if backend.why_not(H200) is None else 2)

    torch._dynamo.reset()
    compiled = torch.compile(add, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)) == 1


def test_what_marks_a_constant_of_a_trace_is_what_torch_does():
    def plain():
        pass

    assert vars(torch.compiler.assume_constant_result(plain)) == vars(where.missing)
