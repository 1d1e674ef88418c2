"""The Triton backend on a GPU, at the sizes of models: bits of rows, and memory."""

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.lab.check.compare import bits
from rl_kernels.linear_logp import linear_logp
from rl_kernels.linear_logp.op import OPERATOR

if "triton" not in [backend.name for backend in OPERATOR.backends]:
    pytest.skip("linear_logp has no Triton backend", allow_module_level=True)
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

ROWS = (2, 63, 64, 65, 129, 1000, 4096)
MIB = 1 << 20
RESULTS = ("logp", "logsumexp", "entropy", "gradient")


def operands(size, vocab, rows=ROWS[-1]):
    draw = Draw(torch.bfloat16, "cuda", seed=1)
    hidden, weight = draw.normal(rows, size), draw.normal(vocab, size, scale=size**-0.5)
    return hidden, weight, draw.ids(vocab, rows), draw.normal(3, rows, dtype=torch.float32)


def results(hidden, weight, ids, upstream, **options):
    """Return the three statistics and the gradient of ``hidden``."""
    leaf = hidden.detach().requires_grad_()
    stats = linear_logp(leaf, weight, ids, return_stats=True, backend="triton", **options)
    return (*(value.detach() for value in stats), torch.autograd.grad(stats, leaf, [*upstream])[0])


def assert_same(found, expected, what):
    for name, value, truth in zip(RESULTS, found, expected, strict=True):
        comparison = bits(value, truth)
        assert comparison.passed, f"{what}, {name}: {comparison.message}"


@pytest.mark.parametrize(
    ("size", "vocab", "all_options"),
    [(size, vocab, False) for size in (64, 1024, 2048) for vocab in (257, 32768, 50257)]
    + [(64, 4095, True), (1023, 1001, True)],
)
def test_a_row_has_the_same_bits_in_every_batch(size, vocab, all_options):
    hidden, weight, ids, upstream = operands(size, vocab)
    draw = Draw(torch.bfloat16, "cuda", seed=4)
    bias, temperature = draw.normal(vocab), draw.uniform(0.5, 2.0, len(hidden), dtype=torch.float32)

    def run(index):
        options = {"bias": bias, "temperature": temperature[index]} if all_options else {}
        return results(hidden[index], weight, ids[index], upstream[:, index], **options)

    count = len(hidden)
    whole = run(slice(count))
    for row in (0, 70, count - 1):
        one = slice(row, row + 1)
        assert_same(run(one), [value[one] for value in whole], f"row {row} alone")
    for rows in ROWS:
        for part in (slice(rows), slice(count - rows, count)):
            assert_same(run(part), [value[part] for value in whole], f"{part}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2)).to("cuda")
    assert_same(run(order), [value[order] for value in whole], "permuted")


def extra(run):
    """Return what ``run`` returns, and how many MiB it held at most beside what was there before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run()
    torch.cuda.synchronize()
    return found, (torch.cuda.max_memory_allocated() - before) / MIB


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
        logp = linear_logp(hidden, weight, ids, workspace_mib=workspace_mib, backend="triton")
        return torch.autograd.grad(logp.sum(), (hidden, weight))

    grads, mib = extra(run)
    gradients = sum(grad.nbytes for grad in grads) / MIB
    # What the forward keeps for the backward, and a few vectors, beside the two.
    assert mib <= gradients + workspace_mib + 16
    assert mib <= 800


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_a_temperature_without_dims_is_read_on_the_device():
    hidden, weight, ids, _ = operands(64, 257, rows=9)
    temperature = torch.tensor(0.7, device="cuda")
    expected = linear_logp(hidden, weight, ids, temperature=0.7, backend="triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = linear_logp(hidden, weight, ids, temperature=temperature, validate=False, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bits(found, expected).passed
