"""Conformance tests of every backend of causal_conv1d that runs here; and what is special to it."""

import pytest
import torch

from rl_kernels.core.testing import Case, Draw
from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.core.triton_lib.launch import INTERPRETED
from rl_kernels.gated_delta import causal_conv1d
from rl_kernels.gated_delta.conv_op import OPERATOR, describe
from rl_kernels.lab.check.conformance import Conformance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = [
    pytest.param(backend.name, marks=[pytest.mark.gpu] * (DEVICE == "cuda"))
    for backend in OPERATOR.backends
    if backend.why_not(describe(torch.empty(1, 1, 8, device=DEVICE))) is None
]
CHUNK = 4
"""Tokens of a chunk in the interpreter, which takes a hundredth of a second for each token of backward."""
NATIVE = (
    Bug("oldest state one token late", "(position + PAST).clamp(0, PAST - 1)]", "(position + 2).clamp(0, PAST - 1)]"),
    Bug("gradient of the last state lost", "if grad_state is not None and", "if grad_state is None and"),
    Bug("gradient from the next sequence", "tokens.length))[:, None], value", "tokens.length + 1))[:, None], value"),
    Bug("chunks of the batch", "slot * CHUNK + tokens.position % CHUNK", "slot * CHUNK + tokens.at % CHUNK"),
    Bug("no activation", "silu(result) if call.silu else result", "result"),
)
TRITON = (
    Bug("search too short", "(further < sequences) & (begin", "(further < sequences - 1) & (begin"),
    Bug("chunks of the row", "position -= (first // CHUNK + 1) * CHUNK", "position -= first"),
    Bug("gradient from three tokens on lost", "dz1, dz2, dz3 = dz, dz1, dz2", "dz1, dz2, dz3 = dz, dz1, zero"),
    Bug("last inputs of the chunk", "length - PAST + number, d", "begin - PAST + number, d"),
    Bug("gradients of two states", "DSTATE + (s.to(tl.int64) * PAST + PAST", "DSTATE + (s.to(tl.int64) * 0 + PAST"),
    Bug("slope of the sigmoid lost", "product(sigmoid, fma(z, one - sigmoid, one))", "sigmoid"),
    Bug("padding not zeroed", "z = tl.where(position >= 0, z, 0.0)", "z = z * 1.0"),
    Bug("last parts left out", "range(full * AHEAD, count)", "range(full * AHEAD, count - 1)"),
)
MODULES = tuple(
    f"rl_kernels.gated_delta.backends.{name}" for name in ("conv_native", "triton.conv.kernels", "triton.conv.backend")
)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Shorten the chunks of the Triton backend in the interpreter."""
    if INTERPRETED:
        monkeypatch.setattr(OPERATOR.backend("triton").load(), "CHUNK", CHUNK)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = (
        Mutants(
            "native", ("rl_kernels.gated_delta.backends.conv_native",), NATIVE, ("plain", "state", "left", "packed")
        ),
        Mutants("triton", MODULES, TRITON, ("bias", "state", "left", "packed")),
    )
    smoke = ("plain", "packed")
    interpreted = {"batch": 4, "seq": 6, "width": 5}
    large = (
        Case("prompt", {"batch": 2, "seq": 2048, "width": 8192}),
        Case(
            "packed",
            {"batch": 12, "seq": 1500, "width": 4096},
            {"layout": "packed", "bias": True, "return_state": True},
        ),
        Case("decode", {"batch": 256, "seq": 1, "width": 8192}, {"state": True, "return_state": True}),
    )
    far = tuple(Case(f"of-{n}", {"batch": n, "seq": n, "width": n}) for n in (2, 3))


def drawn(batch, count, width, dtype=torch.float32):
    draw = Draw(dtype, DEVICE)
    return draw.normal(batch, count, width), draw.normal(width, 4, scale=0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_continued_token_by_token_gives_the_same_bits(backend):
    x, weight = drawn(3, 23, 40, torch.float16)
    whole = causal_conv1d(x, weight, return_state=True, backend=backend)
    state, outs, at = None, [], 0
    for width in (1, 1, 2, 5, 1, 7, 6):
        out, state = causal_conv1d(x[:, at : at + width], weight, state=state, return_state=True, backend=backend)
        outs.append(out)
        at += width
    assert torch.equal(torch.cat(outs, 1), whole.out)
    assert torch.equal(state, whole.state)
    assert torch.equal(state, x[:, -3:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_rounds_once(backend):
    """All bits are those of PyTorch's FP32, rounded, but for a few whose sums are rounded in another order."""
    x, weight = drawn(2, 30, 64, torch.float16)
    for activation in ("silu", None):
        found = causal_conv1d(x, weight, activation=activation, backend=backend)
        rows = torch.nn.functional.conv1d(x.float().mT, weight.float()[:, None], padding=3, groups=64)[..., :-3].mT
        expected = (torch.nn.functional.silu(rows) if activation else rows).half()
        assert float((found == expected).double().mean()) > 0.99


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_continues_sequences(backend):
    x, weight = drawn(5, 9, 256, torch.bfloat16)
    whole = causal_conv1d(x, weight, backend=backend)
    token, state = x[:, :1].clone(), x.new_zeros(5, 3, 256)
    causal_conv1d(token, weight, state=state, return_state=True, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, last = causal_conv1d(token, weight, state=state, return_state=True, backend=backend)
        state.copy_(last)
    state.zero_()
    for number in range(9):
        token.copy_(x[:, number : number + 1])
        graph.replay()
        assert torch.equal(out, whole[:, number : number + 1])
