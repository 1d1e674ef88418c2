"""Bugs planted in the kernels of ``cuda-sm90`` show on a GPU, where its bits are those of ``triton``."""

from importlib.resources import files
from itertools import count
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core.calls import forget
from rl_kernels.core.cuda import launch
from rl_kernels.core.operator import Call
from rl_kernels.core.testing.planted import Bug
from rl_kernels.moe import experts
from rl_kernels.moe.activations import NAMES
from rl_kernels.moe.op import OPERATOR

pytest.importorskip("triton")
backend, products = (
    pytest.importorskip(f"rl_kernels.moe.backends.cuda_sm90.{name}") for name in ("backend", "products")
)

KERNELS = {
    "experts_sm90.cu": (
        Bug("the last route of an expert is not stored", "if (position >= end)", "if (position + 1 >= end)"),
        Bug("a consumer with one route idles", "* MMA_M >= tile.end", "* MMA_M + 1 >= tile.end"),
        Bug("rows of the next token", "/ p.slots + 1 : 0", "/ p.slots + 2 : 0"),
        Bug("gate's bias for up", "half * p.columns + beyond(i)", "beyond(i)"),
        Bug("rows in order for routes", "SCATTERED ? row[i] : position", "position"),
    ),
    "gradient_sm90.cu": (
        Bug(
            "the first stage's tokens in all of a batch",
            "return batch + stage % STAGES_OF_BATCH * SPAN",
            "return batch",
        ),
        Bug("a column too far", "share.chunk * PER_CHUNK", "(share.chunk + 1) * PER_CHUNK"),
        Bug("an expert for another", "static_cast<i64>(tile.expert) * p.n", "static_cast<i64>(tile.expert / 2) * p.n"),
        Bug("a chain begins anew", "sum = *at;", "sum = 0.0f;"),
    ),
    "token_sm90.cu": (
        Bug("rows of a block's first expert", "unit / tiles - first, stride", "0, stride"),
        Bug("gate's bias for up", "PAIR ? row + p.columns : row + 8", "row + 8"),
        Bug("weights of the next unit", "row = unit % tiles * WIDTH;", "row = (unit + 1) % tiles * WIDTH;"),
        Bug("a slot for another", "static_cast<i64>(route.slot) * p", "static_cast<i64>(route.slot / 2) * p"),
    ),
    "activation.cuh": (Bug("up without its bounds", "copysignf(fminf(fabsf(up[i]), LIMIT), up[i])", "up[i]"),),
}
"""By the file that each of them changes."""
SOURCES = {
    file.name: file.read_text(encoding="utf-8")
    for file in files(products.PACKAGE).iterdir()
    if file.name.endswith((".cu", ".cuh"))
}
BUGS = [(file, bug) for file, bugs in KERNELS.items() for bug in bugs]
IDS = [bug.name for _, bug in BUGS]
FEW = backend.FEW
SEEDS = count()
CALLS = (
    # Tokens, D, F, E, k; whole and ragged tiles, one route too many for a tile, K that is no multiple of a stage.
    (700, 136, 200, 3, 2, {}),
    (129, 200, 72, 1, 1, {"biases": True}),
    (300, 72, 136, 4, 2, {"activation": "clamped_swiglu", "transposed": True, "biases": True}),
    (65, 64, 64, 2, 2, {"activation": "gelu_tanh", "interleaved": True, "transposed": True}),
)
TOKENS = (
    # K that is no multiple of a stage; absent experts; as many routes as there may be; the widths of a model.
    (1, 136, 72, 6, 4, {"biases": True}),
    (1, 72, 136, 3, 8, {"activation": "clamped_swiglu", "biases": True}),
    (1, 1096, 520, 300, 8, {"activation": "gelu_tanh"}),
    (1, 2048, 768, 16, 8, {}),
)
"""Calls of one token, without gradients."""


def results(name, call, dtype, seed, *, single=False):
    """Return the output; unless ``single``, first also gradients, and the buffers that those of weights continue."""
    tokens, width, inner, number, slots, options = call
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, device="cuda", generator=generator) * scale).to(dtype)

    gate_up, down = draw(number, 2 * inner, width, scale=width**-0.5), draw(number, width, inner, scale=inner**-0.5)
    options = dict(options)
    if options.get("transposed"):
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    if options.pop("biases", False):
        # Gates beyond -88, where the exponential overflows.
        options |= {"gate_up_bias": 50 * draw(number, 2 * inner), "down_bias": draw(number, width)}
    ids = torch.randint(number + 1, (tokens, slots), device="cuda", generator=generator)
    ids[: tokens // 2, -1] = number // 2
    tensors = [draw(tokens, width), gate_up, down, torch.rand(tokens, slots, device="cuda", generator=generator)]
    upstream, found = draw(tokens, width), []
    for buffered in () if single else (False, True):
        leaves = [x.clone().requires_grad_() for x in tensors]
        hidden, gate_up, down, weights = leaves
        if buffered:
            gate_up.main_grad, down.main_grad = (torch.ones_like(x, dtype=torch.float32) for x in (gate_up, down))
        out = experts(hidden, gate_up, down, ids, weights, **options, backend=name)
        out.backward(upstream)
        found += [out.detach(), hidden.grad, weights.grad]
        found += [gate_up.main_grad, down.main_grad] if buffered else [gate_up.grad, down.grad]
    with torch.no_grad():
        found.append(experts(*tensors[:3], ids, tensors[3], **options, backend=name))
    return found


def is_different():
    """Say whether a call has other bits than ``triton`` has; those after it are not made."""
    for call in CALLS:
        for dtype in (torch.bfloat16, torch.float16):
            # Other numbers each time: a result that was not written must not be the one of an earlier call.
            seed = next(SEEDS)
            ours, others = (results(name, call, dtype, seed) for name in ("cuda-sm90", "triton"))
            if not all(map(torch.equal, ours, others)):
                return True
    return token_is_different()


def token_is_different():
    """Say the same of calls of one token."""
    forget()
    with patch.object(backend, "FEW", FEW):
        for call in TOKENS:
            for dtype in (torch.bfloat16, torch.float16):
                seed = next(SEEDS)
                ours, others = (results(name, call, dtype, seed, single=True) for name in ("cuda-sm90", "triton"))
                if not all(map(torch.equal, ours, others)):
                    return True
    forget()
    return False


@pytest.fixture
def build(make_kernels, cubins, monkeypatch):
    """Return a function that makes the backend run changed copies of its kernels."""

    def changed(file, bug):
        texts = {name: text.replace(bug.old, bug.new) if name == file else text for name, text in SOURCES.items()}
        make_kernels("planted_sm90", **{name.replace(".", "__"): text for name, text in texts.items()})
        monkeypatch.setattr(products, "PACKAGE", "planted_sm90")
        monkeypatch.setattr(launch, "_kernels", {})
        monkeypatch.setattr(launch, "_modules", {})
        forget()

    yield changed
    forget()


@pytest.fixture
def hopper(monkeypatch):
    """Skip where there is no Hopper GPU; let few routes take the kernels too."""
    call = Call.of(torch.zeros(1, 8, dtype=torch.bfloat16, device="cuda"), D=8, F=8)
    reason = OPERATOR.backend("cuda-sm90").why_not(call)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(backend, "FEW", -1)
    forget()
    yield
    forget()


@pytest.mark.parametrize(("file", "bug"), BUGS, ids=IDS)
def test_a_bug_changes_one_place(file, bug):
    assert SOURCES[file].count(bug.old) == 1
    assert bug.old != bug.new


def test_every_activation_is_called():
    assert {options.get("activation", "silu") for *_, options in CALLS} == set(NAMES)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_bits_are_those_of_triton():
    assert not is_different()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("file", "bug"), BUGS, ids=IDS)
def test_planted_bugs_show(build, file, bug):
    build(file, bug)
    assert token_is_different() if file == "token_sm90.cu" else is_different()
