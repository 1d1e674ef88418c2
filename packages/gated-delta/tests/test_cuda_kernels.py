"""Bugs planted in kernels of ``cuda-sm90`` show on a GPU, where decode has the bits of prefill."""

from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest
import torch

from rl_kernels.core.calls import forget
from rl_kernels.core.cuda import launch
from rl_kernels.core.operator import Call
from rl_kernels.core.testing.planted import Bug
from rl_kernels.gated_delta import DeltaCache, gated_delta_rule, reference
from rl_kernels.gated_delta.backends.cuda_sm90 import decode, prefill
from rl_kernels.gated_delta.op import OPERATOR

BUGS = (
    Bug("the newest key left out", "if (at.warp == t / STEP) {", "if (at.warp == t / STEP + 1) {"),
    Bug("the token's own score left out", "row <= t ? __fmul_rn(between", "row < t ? __fmul_rn(between"),
    Bug("a term of the inverse left out", "row >= column && row < t", "row > column && row < t"),
    Bug(
        "residuals of the next row",
        "row = piece * STEP + 2 * at.j + r % 2",
        "row = piece * STEP + 2 * at.j + 1 - r % 2",
    ),
    Bug("a column for the next", "n % 2 ? 0x7632 : 0x5410", "n % 2 ? 0x5410 : 0x7632"),
    Bug(
        "the diagonal of the faded inverse left out",
        "column + n <= row ? __fmul_rn(fading",
        "column + n < row ? __fmul_rn(fading",
    ),
    Bug("a state that does not decay", "x = __fmul_rn(grown, x);", "x = __fmul_rn(1.0f, x);"),
    Bug("a token counted twice", "p.shift) - 1)) + 1;", "p.shift) - 1)) + 2;"),
    Bug("no block is the last one", "gridDim.x * gridDim.y - 1", "gridDim.x * gridDim.y"),
    Bug("the key of the next row", "[t * LANES + threadIdx.x] = ", "[(t + 1) % ROWS * LANES + threadIdx.x] = "),
)
PREPARE, SCAN, COLUMNS = "prepare_sm90.cu", "scan_sm90.cu", "columns.cuh"
PREFILL_BUGS = (
    (PREPARE, Bug("a row sees itself", "s < t && !w.is_held(t)", "s <= t && !w.is_held(t)")),
    (PREPARE, Bug("a token's own score left out", "p[e] = s <= t ?", "p[e] = s < t ?")),
    (PREPARE, Bug("a term of the inverse left out", "column > row + 1", "column >= row + 1")),
    (PREPARE, Bug("beta left out", "beta * (between * kk", "1.0f * (between * kk")),
    (PREPARE, Bug("an earlier row left out", "c + 16 * j <= s ?", "c + 16 * j < s ?")),
    (PREPARE, Bug("decay to the end left out", "factor.x * two.x", "1.0f * two.x")),
    (PREPARE, Bug("a held row is solved again", "!= nullptr ? -w.base : 0", "!= nullptr ? -w.base - 1 : 0")),
    (PREPARE, Bug("held sums left out", "w.is_held(t + i) ? g[i] : total + g[i]", "total + g[i]")),
    (SCAN, Bug("a state that does not decay", "c.scale(decay[ROWS - 1]);", "c.scale(1.0f);")),
    (COLUMNS, Bug("a held residual is computed again", "if (t < from)", "if (t + 1 < from)")),
    (SCAN, Bug("an output that does not decay", "o[i] *= decay[", "o[i] *= 1.0f + 0.0f * decay[")),
    (SCAN, Bug("an open chunk in the state", "is_cached && used >= ROWS && used", "is_cached && used")),
    (COLUMNS, Bug("part of a chunk before", "2 * warp + lane / 8 % 2", "2 * warp + (lane / 8 + 1) % 2")),
)
REPLAY, REVERSE = "replay_sm90.cu", "reverse_sm90.cu"
GRADIENT_BUGS = (
    (PREPARE, Bug("beta left out of the inverse", "? numbers.beta[column] : 1.0f", "? 1.0f : 1.0f")),
    (PREPARE, Bug("sums of another head", "a.sums[(i64(w.slot) * a.heads + head)", "a.sums[i64(w.slot) * a.heads")),
    (PREPARE, Bug("queries for keys", "(is_key ? a.unit_k : a.unit_q)", "(is_key ? a.unit_q : a.unit_k)")),
    (REPLAY, Bug("a state that does not decay", "c.scale(decay[ROWS - 1]);", "c.scale(1.0f);")),
    (REPLAY, Bug("half of a state", "item * SIZE + ROWS, c.part", "item * SIZE, c.part")),
    (REVERSE, Bug("rows of the next sequence", "&= t + 1 < to ?", "&= true ?")),
    (REVERSE, Bug("decay of the state left out", "c.scale(decay[ROWS - 1]);", "c.scale(1.0f);")),
    (
        REVERSE,
        Bug(
            "a gradient through residuals added",
            "{-d.x * pair[0], -d.y * pair[1]}",
            "{d.x * pair[0], d.y * pair[1]}",
        ),
    ),
    (REVERSE, Bug("scale left out", "fmaf(a.scale, z[2 * i], y", "fmaf(1.0f, z[2 * i], y")),
    (REVERSE, Bug("a warp's sum for all", "c.part * WARPS + c.warp] = kept", "c.part * WARPS] = kept")),
    (REVERSE, Bug("chunks in ascending order", "chunk = job.chunks - 1 - i, state", "chunk = i, state")),
)
SOURCES = {
    file.name: file.read_text(encoding="utf-8")
    for file in files(decode.PACKAGE).iterdir()
    if file.name.endswith((".cu", ".cuh"))
}
LARGEST = 8e-3
"""Error of gradients, beside those of Triton: 4e-3."""
FILES = tuple(name for name in SOURCES if name.startswith("decode"))


def differing(dtype: torch.dtype, schedule: decode.Schedule, monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the numbers of rows and of the cache that whole prefill, decode and pieces of a chunk have different."""
    monkeypatch.setattr(decode, "schedule_of", lambda *_: schedule)
    forget()
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(2, 132, 2, 128, device="cuda", generator=generator).to(dtype) for _ in range(2))
    v = torch.randn(2, 132, 4, 128, device="cuda", generator=generator).to(dtype)
    g, beta = (torch.rand(2, 132, 4, device="cuda", generator=generator) for _ in range(2))
    operands = q, k, v, -0.2 * g, beta

    def cut(places: Sequence[int]) -> tuple[torch.Tensor, DeltaCache]:
        cache = DeltaCache.empty(2, 2, 4, 128, 128, dtype=dtype, device="cuda")
        pieces = [[x[:, start:end] for x in operands] for start, end in pairwise(places)]
        rows = [gated_delta_rule(*piece, cache=cache, validate=False, backend="cuda-sm90") for piece in pieces]
        return torch.cat(rows, 1), cache

    whole, expected = cut((0, 132))
    lower = torch.ones(4, 4, device="cuda", dtype=torch.bool).tril()
    pairs = []
    for places in ((0, *range(50, 133)), (0, 50, 57, 132)):
        rows, cache = cut(places)
        pairs += [(whole, rows), (expected.lengths, cache.lengths), (expected.state, cache.state)]
        for name in ("keys", "residuals", "decays"):
            pairs.append((getattr(expected, name)[:, :, :4], getattr(cache, name)[:, :, :4]))
        pairs.append(tuple(torch.where(lower, x.inverse[:, :, :4, :4], 0.0) for x in (expected, cache)))
    return sum(int((x != y).sum()) for x, y in pairs)


def gradient_error(dtype: torch.dtype) -> float:
    """Return the largest L2 error of gradients of packed sequences, relative to those of the recurrence in FP64."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(1, 270, 2, 128, device="cuda", generator=generator).to(dtype) for _ in range(2))
    v, grad = (torch.randn(1, 270, 4, 128, device="cuda", generator=generator).to(dtype) for _ in range(2))
    g, beta = (torch.rand(1, 270, 4, device="cuda", generator=generator) for _ in range(2))
    # The last sequence, whose rows are copied with those of the one before, must not reach it.
    grad[:, 265:] = torch.nan
    initial, grad_state = (torch.randn(4, 4, 128, 128, device="cuda", generator=generator) for _ in range(2))
    bounds = torch.tensor([0, 69, 69, 265, 270], device="cuda")

    def gradients(function: Callable[..., Any], **options: Any) -> tuple[torch.Tensor, ...]:
        wide = function is reference.gated_delta_rule
        *call, last, upstream = (
            x.double() if wide else x for x in (q, k, v, -0.1 * g, beta, initial, grad_state, grad)
        )
        leaves = [x.detach().requires_grad_() for x in call]
        out = function(*leaves[:5], initial_state=leaves[5], cu_seqlens=bounds, return_state=True, **options)
        return torch.autograd.grad(tuple(out), leaves, (upstream, last))

    ours = gradients(gated_delta_rule, backend="cuda-sm90")
    gold = gradients(reference.gated_delta_rule)
    pairs = [(x.double()[:, :265], y[:, :265]) for x, y in zip(ours[:5], gold[:5], strict=True)]
    pairs.append((ours[5].double()[:3], gold[5][:3]))
    # Not Python's max, which passes over NaN.
    return float(torch.stack([(x - y).norm() / y.norm() for x, y in pairs]).max())


@pytest.fixture
def hopper():
    """Skip where there is no Hopper GPU."""
    q = torch.zeros(1, 1, 2, 128, dtype=torch.bfloat16, device="cuda")
    reason = OPERATOR.backend("cuda-sm90").why_not(Call.of(q, Hk=2, Hv=2, Dk=128, Dv=128))
    if reason is not None:
        pytest.skip(reason)
    yield
    forget()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_changes_one_place(bug):
    assert sum(SOURCES[name].count(bug.old) for name in FILES) == 1


@pytest.mark.parametrize(("file", "bug"), PREFILL_BUGS, ids=lambda x: getattr(x, "name", None))
def test_a_bug_of_prefill_changes_one_place(file, bug):
    assert SOURCES[file].count(bug.old) == 1


@pytest.mark.parametrize(("file", "bug"), GRADIENT_BUGS, ids=lambda x: getattr(x, "name", None))
def test_a_bug_of_gradients_changes_one_place(file, bug):
    assert SOURCES[file].count(bug.old) == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("schedule", decode.SCHEDULES, ids=lambda schedule: f"{schedule.parts} parts")
def test_decode_has_the_bits_of_prefill(schedule, dtype, monkeypatch):
    assert differing(dtype, schedule, monkeypatch) == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gradients_are_those_of_the_recurrence(dtype):
    assert gradient_error(dtype) < LARGEST


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("file", "bug"), GRADIENT_BUGS, ids=lambda x: getattr(x, "name", None))
def test_planted_bugs_of_gradients_show(file, bug, make_kernels, cubins, monkeypatch):
    texts = {name: text.replace(bug.old, bug.new) if name == file else text for name, text in SOURCES.items()}
    make_kernels("planted_delta", **{name.replace(".", "__"): text for name, text in texts.items()})
    monkeypatch.setattr(prefill, "PACKAGE", "planted_delta")
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(launch, "_modules", {})
    forget()
    assert not gradient_error(torch.bfloat16) < LARGEST


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_show(bug, make_kernels, cubins, monkeypatch):
    texts = {name: text.replace(bug.old, bug.new) if name in FILES else text for name, text in SOURCES.items()}
    make_kernels("planted_delta", **{name.replace(".", "__"): text for name, text in texts.items()})
    monkeypatch.setattr(decode, "PACKAGE", "planted_delta")
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(launch, "_modules", {})
    assert differing(torch.bfloat16, decode.SCHEDULES[-1], monkeypatch)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("file", "bug"), PREFILL_BUGS, ids=lambda x: getattr(x, "name", None))
def test_planted_bugs_of_prefill_show(file, bug, make_kernels, cubins, monkeypatch):
    texts = {name: text.replace(bug.old, bug.new) if name == file else text for name, text in SOURCES.items()}
    make_kernels("planted_delta", **{name.replace(".", "__"): text for name, text in texts.items()})
    monkeypatch.setattr(prefill, "PACKAGE", "planted_delta")
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(launch, "_modules", {})
    assert differing(torch.bfloat16, decode.SCHEDULES[-1], monkeypatch)
