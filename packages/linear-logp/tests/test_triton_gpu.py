"""The Triton backend on a GPU, at the sizes of models: memory, and nothing that waits."""

import pytest
import torch

from rl_kernels.lab.check.compare import bits
from rl_kernels.linear_logp import Memory, linear_logp
from rl_kernels.linear_logp.op import OPERATOR

if "triton" not in [backend.name for backend in OPERATOR.backends]:
    pytest.skip("linear_logp has no Triton backend", allow_module_level=True)
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

MIB = 1 << 20


def extra(run):
    """Return what ``run`` returns, and how many MiB it held at most beside what was there before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    return result, (torch.cuda.max_memory_allocated() - before) / MIB


def large(size, vocab):
    """Return operands drawn on the GPU: drawing so many on the CPU takes seconds."""
    torch.manual_seed(4)
    hidden = torch.randn(4096, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, size, device="cuda", dtype=torch.bfloat16) * size**-0.5).requires_grad_()
    return hidden, weight, torch.randint(vocab, (4096,), device="cuda")


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("vocab", [32768, 131072, 151936])
def test_forward_holds_no_logits(vocab, stats):
    call = large(2048, vocab)
    with torch.no_grad():
        _, mib = extra(lambda: linear_logp(*call, return_stats=stats, backend="triton"))
    assert mib < 64


@pytest.mark.parametrize("workspace_mib", [64, 256])
def test_backward_holds_the_gradients_and_the_workspace(workspace_mib):
    hidden, weight, ids = large(2048, 131072)

    def run():
        logp = linear_logp(hidden, weight, ids, memory=Memory(workspace_mib), backend="triton")
        return torch.autograd.grad(logp.sum(), (hidden, weight))

    grads, mib = extra(run)
    gradients = sum(grad.nbytes for grad in grads) / MIB
    # What the forward keeps for the backward, and a few vectors, beside the two.
    assert mib <= gradients + workspace_mib + 16
    assert mib <= 800


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_temperature_without_dims_does_not_sync():
    call = large(64, 257)
    temperature = torch.tensor(0.7, device="cuda")
    expected = linear_logp(*call, temperature=0.7, backend="triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = linear_logp(*call, temperature=temperature, validate=False, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bits(result, expected).passed
