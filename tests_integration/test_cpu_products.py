"""Products of a CPU: bits with other kernels of its libraries, errors beside PyTorch's, and what ``explain`` says."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from rl_kernels.attention import det_attention
from rl_kernels.core import explain, verified
from rl_kernels.core.calls import forget
from rl_kernels.core.commands.cli import main
from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import det_linear
from rl_kernels.linear_logp import linear_logp

PLAIN_MKL = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}
OLDER_CPU = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
LIBRARIES = {
    "MKL's plain kernels": (PLAIN_MKL, True),
    "kernels of an older CPU": (OLDER_CPU, True),
    "oneDNN off": ({}, False),
    "oneDNN off, MKL's plain kernels": (PLAIN_MKL, False),
}
RELATIONS = """
import sys, torch
from rl_kernels.attention import det_attention
from rl_kernels.det_gemm import det_linear
from rl_kernels.linear_logp import linear_logp
torch.backends.mkldnn.enabled = sys.argv[1] == "True"
for dtype in (torch.float32, torch.bfloat16):
    x, weight = torch.randn(150, 320).to(dtype), torch.randn(192, 320).to(dtype)
    ids, order = torch.arange(150), torch.randperm(150)
    q, k, v = (torch.randn(2, 150, heads, 40).to(dtype) for heads in (6, 2, 2))
    wholes = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for call in (lambda rows: det_linear(x[rows], weight), lambda rows: linear_logp(x[rows], weight, ids[rows])):
            wholes.append(call(slice(None)))
            assert torch.equal(call(order), wholes[-1][order])
            for first in (0, 63, 149):
                for count in (1, 3, 8, 33, 64):
                    rows = slice(first, first + count)
                    assert torch.equal(call(rows), wholes[-1][rows]), (dtype, threads, rows)
        whole = det_attention(q, k, v, causal=True)
        for t in (0, 63, 64, 149):
            one = det_attention(q[1:, t : t + 1], k[1:, : t + 1], v[1:, : t + 1], causal=True)
            assert torch.equal(one[0, 0], whole[1, t]), (dtype, threads, t)
    assert all(map(torch.equal, wholes[:2], wholes[2:])), dtype
print("same bits")
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_bits_with_other_kernels_of_the_libraries(library):
    variables, onednn = LIBRARIES[library]
    command = [sys.executable, "-c", RELATIONS, str(onednn)]
    run = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600)
    assert run.stdout == "same bits\n", run.stderr


def errors(call, stock, *tensors):
    """Return the root mean squares of the errors of two functions, against FP64."""
    exact = stock(*(x.double() for x in tensors))
    return [(function(*tensors).double() - exact).square().mean().sqrt().item() for function in (call, stock)]


def attention(q, k, v):
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 64, 300])
@pytest.mark.parametrize("size", [(576, 192), (100, 37), (1536, 576), (4096, 64)], ids=str)
def test_a_product_is_as_exact_as_the_library(size, rows, dtype):
    draw, (inner, columns) = Draw(dtype), size
    own, stock = errors(det_linear, F.linear, draw.normal(rows, inner), draw.normal(columns, inner))
    assert own <= 2 * stock


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_and_attention_are_as_exact_as_stock(dtype):
    draw = Draw(dtype)
    hidden, weight, ids = draw.normal(200, 256), draw.normal(5000, 256) / 16, torch.arange(200) * 24

    def log_softmax(hidden, weight):
        logits = F.linear(hidden, weight)
        wide = logits if hidden.dtype == torch.float64 else logits.float()
        return wide.log_softmax(-1)[torch.arange(200), ids]

    own, stock = errors(lambda *x: linear_logp(*x, ids), log_softmax, hidden, weight)
    assert own <= 2 * stock
    q, k, v = (draw.normal(2, 150, 4, 64) for _ in range(3))
    own, stock = errors(lambda *x: det_attention(*x, causal=True), attention, q, k, v)
    assert own <= 2 * stock


def halves(block, right):
    """Return the product as the sum of two: the same but for rounding."""
    half = block.shape[1] // 2
    return block[:, :half] @ right[:half] + block[:, half:] @ right[half:]


def by_height(block, right, out=None):
    """Add in another order in blocks of more than 64 rows."""
    found = halves(block, right) if len(block) > 64 else block @ right
    return found if out is None else out.copy_(found)


def by_place(block, right, out=None):
    """Add in another order in the last row."""
    found = block @ right
    found[-1] = halves(block, right)[-1]
    return found if out is None else out.copy_(found)


@pytest.fixture
def plant(monkeypatch):
    def put(library):
        monkeypatch.setattr(verified, "library", library)
        monkeypatch.setattr(verified, "_ways", {})
        verified.tile_of.cache_clear()
        forget()

    yield put
    verified.tile_of.cache_clear()
    forget()


@pytest.mark.parametrize(
    ("library", "note"),
    [(by_height, "products tile by tile on one thread"), (by_place, "products in FP64")],
    ids=["by height", "by place"],
)
def test_explain_and_doctor_say_where_a_library_does_not_keep_bits(plant, capsys, library, note):
    x, weight = torch.randn(100, 96), torch.randn(80, 96)
    last = explain("det_gemm", x, weight.t())[-1]
    assert str(last) == "native: chosen"
    plant(library)
    last = explain("det_gemm", x, weight.t())[-1]
    assert str(last).startswith(f"native: chosen; {note}")
    assert main(["doctor"]) == 0
    assert note.removeprefix("products ") in capsys.readouterr().out
    # The rows have their bits all the same.
    whole = det_linear(x, weight)
    assert torch.equal(det_linear(x[99:], weight), whole[99:])
