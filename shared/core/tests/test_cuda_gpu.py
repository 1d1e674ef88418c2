"""Kernels on a GPU: launched where and when PyTorch is, with all that a launch can ask for."""

from threading import Thread

import pytest
import torch

from rl_kernels.core.cuda import toolchain
from rl_kernels.core.cuda.driver import CudaError
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program, compile_program
from rl_kernels.core.cuda.tensor_map import tensor_map
from rl_kernels.core.cuda.where import target_of
from rl_kernels.core.operator import arch_of

MISSING = toolchain.why_no_compiler()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

ADD = """
extern "C" __global__ void add(const float* x, float* out, long long n, float y) {
    long long i = 1ll * blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y * TIMES;
}
extern "C" __global__ void absent(const float* x, float* out) { out[0] = x == nullptr ? 1.0f : 0.0f; }
extern "C" __global__ void everything(float* out, signed char b, short h, int i, long long q, float f, double d) {
    double values[] = {double(b), double(h), double(i), double(q), double(f), d};
    for (int k = 0; k < 6; ++k) out[k] = float(values[k]);
}
"""


@pytest.fixture(autouse=True)
def sources(make_sources):
    make_sources("toy_kernels", add__cu=ADD)


def load(entry="add", signature="PPqf", times=2):
    arch = target_of(arch_of("cuda", 0), exact=False)
    program = Program("toy_kernels", "add.cu", arch, (("TIMES", times),))
    return kernel(program, entry, signature, torch.device("cuda", 0))


def test_the_source_compiles():
    assert compile_program(Program("toy_kernels", "add.cu", "sm_90", (("TIMES", 2),))).cubin


def blocks(x):
    return -(-x.numel() // 128)


@pytest.mark.gpu
def test_parameters_of_every_kind():
    x = torch.randn(1000, device="cuda:0")
    out = torch.full_like(x, torch.nan)
    load().launch(blocks(x), 128, x, out, x.numel(), 1.5)
    assert torch.equal(out, x + 3)
    out = torch.empty(6, device="cuda:0")
    load("everything", "Pbhiqfd").launch(1, 1, out, -3, 300, -(2**20), 2**40, 0.5, 0.25)
    assert out.tolist() == [-3, 300, -(2**20), 2**40, 0.5, 0.25]
    # None is a null pointer.
    out = torch.zeros(1, device="cuda:0")
    load("absent", "PP").launch((1, 1, 1), 1, None, out)
    assert out.item() == 1
    load("absent", "PP").launch((1,), 1, out, out)
    assert out.item() == 0


@pytest.mark.gpu
def test_sizes_that_do_not_fit_launch_nothing():
    x = torch.zeros(4, device="cuda:0")
    add = load()
    with pytest.raises(CudaError, match=r"add: grid \(1, 1, 1\), block 4096, .*: CUDA_ERROR_INVALID_VALUE"):
        add.launch(1, 4096, x, x, 4, 1.0)
    with pytest.raises(CudaError, match=r"add: grid \(0, 1, 1\)"):
        add.launch(0, 32, x, x, 4, 1.0)
    torch.cuda.synchronize()
    assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.gpu
def test_a_signature_or_an_entry_that_the_kernel_does_not_have():
    for signature in ("PPq", "PPqfi", "PPif", "PPqd", "PPff"):
        with pytest.raises(ValueError, match=r"signature: .* add has \[\(0, 8\), \(8, 8\), \(16, 8\), \(24, 4\)\]"):
            load(signature=signature)
    with pytest.raises(CudaError, match="subtract: CUDA_ERROR_NOT_FOUND"):
        load("subtract")


@pytest.mark.gpu
def test_the_current_stream_is_the_one():
    x, out = (torch.zeros(1000, device="cuda:0") for _ in range(2))
    add = load()
    add.launch(blocks(x), 128, x, out, x.numel(), 0.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Long enough for a launch on any other stream to come first.
        torch.cuda._sleep(200_000_000)
        x.fill_(5)
        add.launch(blocks(x), 128, x, out, x.numel(), 1.0)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(out, torch.full_like(out, 7))


@pytest.mark.gpu
def test_in_a_graph_even_if_it_is_loaded_while_it_is_captured():
    x, out = (torch.zeros(1000, device="cuda:0") for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        load(times=3).launch(blocks(x), 128, x, out, x.numel(), 1.0)
    for value in (1.0, 2.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(out, torch.full_like(out, value + 3))


@pytest.mark.gpu
def test_many_threads_launch_at_once():
    x = torch.randn(1000, device="cuda:0")
    outs = [torch.empty_like(x) for _ in range(8)]
    failed = []

    def work(number):
        try:
            for _ in range(200):
                load().launch(blocks(x), 128, x, outs[number], x.numel(), float(number))
        except Exception as error:
            failed.append(error)

    threads = [Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failed
    assert all(torch.equal(out, x + 2.0 * number) for number, out in enumerate(outs))


@pytest.mark.gpu
def test_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(1000, device="cuda:1")
    out = torch.empty_like(x)
    program = Program("toy_kernels", "add.cu", target_of(arch_of("cuda", 1), exact=False), (("TIMES", 2),))
    kernel(program, "add", "PPqf", x.device).launch(blocks(x), 128, x, out, x.numel(), 1.0)
    assert torch.equal(out, x + 2)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_a_tensor_map_in_a_thread_that_has_no_context():
    if torch.cuda.get_device_capability(0)[0] < 9:
        pytest.skip("needs sm_90")
    x, found = torch.randn(10, 20, device="cuda:0"), []
    thread = Thread(target=lambda: found.append(tensor_map(x, (4, 8))))
    thread.start()
    thread.join()
    assert found == [tensor_map(x, (4, 8))]
