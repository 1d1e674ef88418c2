"""Sampled tokens, what is kept, and their log-probabilities: against masks in FP64, in bits, and on every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw, bits_of
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.linear_logp import LinearLogits, Sampled, drawing, linear_logits, linear_logp
from rl_kernels.linear_logp.op import OPERATOR
from rl_kernels.linear_logp.spec.drawing import KINDS, REQUESTS, given, per_row, uniform_of

CPU = torch.device("cpu")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits_of(one), bits_of(other))


def of_row(value: Any, row: int) -> Any:
    return value[row].item() if isinstance(value, torch.Tensor) else value


def check_row(x: torch.Tensor, u: float, request: dict[str, Any], ids: int, logps: list[float], least: float) -> None:
    """Compare a row's results with the definition over a mask of its vocabulary, in FP64."""
    t, k = request.get("temperature", 1.0), request.get("top_k", 0)
    p, m = request.get("top_p", 1.0), request.get("min_p", 0.0)
    if t == 0:
        assert ids == int(x.argmax())
        assert least == -math.inf
        t, k, p, m = 1.0, 0, 1.0, 0.0
        u = math.nan
    z = x / torch.tensor(t)
    kept = z >= least
    mass = (z.double() - z.max().double()).exp()
    of_k = kept.new_ones(kept.shape) if not 0 < k < len(x) else z >= z.sort(descending=True).values[k - 1]
    assert not (kept & ~of_k).any()
    # A threshold is the smallest kept z, unless nothing is filtered.
    assert least == -math.inf or bool((z == least).any())
    above, target = mass[z > least].sum(), p * mass[of_k].sum()
    reaches, reached_before = mass[kept].sum() / target - 1, above / target - 1
    if p < 1:
        assert reaches > -1e-6 or m > 0
        assert reached_before < 1e-6
    assert bool((mass[kept] >= m * (1 - 1e-6)).all())
    left_out = of_k & ~kept
    if left_out.any():
        # The largest entry that is left out is left out by a filter.
        mass_of_next = mass[left_out].max()
        assert mass_of_next <= m * (1 + 1e-6) or (p < 1 and reaches > -1e-6)
    assert bool(kept[ids])
    share = mass * kept / mass[kept].sum()
    if not math.isnan(u):
        before = share[:ids].sum()
        assert before - 1e-6 <= u <= before + share[ids] + 1e-6
    for found, over in zip(logps, (kept, kept.new_ones(kept.shape)), strict=True):
        assert abs(found - (mass[ids] / mass[over].sum()).log().item()) < 2e-5


def check_definition(rows: int = 12, vocab: int = 301) -> None:
    for kind in KINDS:
        logits, u = given(kind, rows, vocab), uniform_of(rows)
        for request in (*REQUESTS, per_row(rows)):
            found = logits.sample(uniform=u, **request)
            for row in range(rows):
                of = {name: of_row(value, row) for name, value in request.items()}
                ids, *logps, least = (value[row].item() for value in found)
                check_row(logits.logits[row], u[row].item(), of, ids, logps, least)


def check_boundaries(backend: str = "native", device: torch.device = CPU) -> None:
    """A uniform number, or top_p, that a sum of masses reaches exactly."""
    for vocab in (2048, 4):
        logits = given("equal", 1, vocab, backend, device)
        assert logits.sample(uniform=torch.tensor([0.5], device=device)).ids.tolist() == [vocab // 2]
    # The first has half of the probability.
    logits.logits[:] = torch.tensor([math.log(2), 0.0, 0.0, -math.inf])
    logits.norm[:] = torch.tensor([math.log(2), math.log(2)])
    assert logits.sample(top_p=0.5).min_logit.tolist() == logits.logits[:, 0].tolist()
    # Numbers out of range give a token of the vocabulary too: the last one with a mass, or 0 if nothing is kept.
    one = torch.ones(1, device=device)
    requests = dict(uniform=one), dict(min_p=1.5 * one)
    found = [logits.sample(**request, validate=False).ids.item() for request in requests]
    assert found == [2, 0]


def check_all() -> None:
    check_definition()
    check_boundaries()
    check_small_top_p("native", CPU)


def test_definition_over_masks_in_fp64() -> None:
    check_all()


BUGS = (
    Bug("k counted from 0", "(count - 1).clamp(min=0)), -torch.inf", "count.clamp(min=0)), -torch.inf"),
    Bug("ties with the k-th are split", "(z >= kth) &", "(z > kth) &"),
    Bug("top-p of the whole row", "torch.where(ordered >= kth, masses(top - ordered), 0)", "masses(top - ordered)"),
    Bug("one token too few", "(reached < target).sum", "(reached <= target).sum"),
    Bug("min-p of z, not of d", "(top - z <= farthest)", "(z <= farthest)"),
    Bug("mass of what is not kept", "torch.where(is_kept, masses(top - z), 0).cumsum", "masses(top - z).cumsum"),
    Bug("the token before", "(mass <= wanted[:, None])", "(mass < wanted[:, None])"),
    Bug("threshold before the temperature", "least = torch.where(is_kept, z,", "least = torch.where(is_kept, logits,"),
    Bug("greedy draws", "torch.where(is_greedy, 0, fraction(uniform))", "fraction(uniform)"),
    Bug("greedy is filtered", "torch.where(is_greedy | keeps_all, -torch.inf, least)", "least"),
    Bug("a power of one term less", "POWERS[-2::-1]", "POWERS[-3::-1]"),
)
MODULES = ("rl_kernels.linear_logp.drawing", "rl_kernels.linear_logp.backends.native")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_fails(bug: Bug) -> None:
    with planted(MODULES, bug), pytest.raises(AssertionError):
        check_all()


def check_bits(dtype: torch.dtype, device: str, backend: str, rows: int, vocab: int) -> None:
    """Compare a row alone with the batch, and its log-probabilities with those of linear_logp."""
    draw = Draw(dtype, seed=5, device=device)
    hidden, weight, u = draw.normal(rows, 16), draw.normal(vocab, 16), uniform_of(rows, torch.device(device))
    for place, request in enumerate((*REQUESTS, per_row(rows, torch.device(device)))):
        common = dict(softcap=[0.0, 5.0][place % 2], backend=backend)
        found = linear_logits(hidden, weight, **common).sample(uniform=u, **request)
        t = torch.as_tensor(request.get("temperature", 1.0), dtype=torch.float32, device=device)
        t = torch.where(t == 0, 1.0, t)
        options = dict(temperature=t, **common)
        assert same(found.logp, linear_logp(hidden, weight, found.ids, **options))
        assert same(found.kept_logp, linear_logp(hidden, weight, found.ids, min_logit=found.min_logit, **options))
        for part in (slice(1, 2), slice(rows // 2, rows)):
            of = {name: value[part] if isinstance(value, torch.Tensor) else value for name, value in request.items()}
            alone = linear_logits(hidden[part], weight, **common).sample(uniform=u[part], **of)
            assert all(same(one, whole[part]) for one, whole in zip(alone, found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_linear_logp_alone_and_in_a_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "BLOCK_ELEMENTS", 3 * 2050)
    check_bits(dtype, "cpu", "native", 70, 2050)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [300, 5003, 32768])
def test_bits_on_a_gpu(gpu_backend: str, vocab: int) -> None:
    check_bits(torch.bfloat16, "cuda", gpu_backend, 70, vocab)


def check_backend(backend: str, device: torch.device, rows: int, vocab: int, step: int = 1) -> None:
    """Compare tokens and thresholds with native's exactly, log-probabilities closely; of requests every ``step``-th."""
    check_boundaries(backend, device)
    for place, kind in enumerate(KINDS):
        logits, u = given(kind, rows, vocab, backend, device), uniform_of(rows, device)
        if place % 2:
            logits = logits._replace(logits=logits.logits.t().contiguous().t())
        for request in (per_row(rows, device), *REQUESTS[:2], *REQUESTS[2 + place % step :: step]):
            found = logits.sample(uniform=u, **request)
            expected = logits._replace(backend="native").sample(uniform=u, **request)
            assert same(found.ids, expected.ids)
            assert torch.equal(found.min_logit, expected.min_logit)
            assert (found.kept_logp - expected.kept_logp).abs().max() < 1e-5
            assert (found.logp - expected.logp).abs().max() < 1e-5


def check_small_top_p(backend: str, device: torch.device) -> None:
    """Of a wide row, a top_p that is just above what the largest entry reaches, but not once it is rounded down."""
    unit, (top, rest) = 1 << drawing.FRACTION_BITS, drawing.masses(torch.tensor([0.0, 1.1])).tolist()
    # Where the largest entry has hardly more than a whole number of units.
    sizes = range(1 << 20, 1 << 21)
    vocab = next(size for size in sizes if top * unit % (top + (size - 1) * rest) < 0.01 * size * rest)
    whole = top + (vocab - 1) * rest
    top_p = (top * unit // whole + 0.99) / unit
    row = torch.full((1, vocab), -1.1)
    row[0, 7] = 0.0
    norm = torch.tensor([[0.0, math.log(whole / top)]])
    logits = LinearLogits(row.to(device), norm.to(device), None, backend, torch.float32)
    assert logits.sample(top_p=top_p).min_logit.tolist() == [0.0]


@pytest.fixture(params=[16, 8192], ids=lambda size: f"list of {size}")
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where Triton is not interpreted; give rows a list of so many entries."""
    reason = OPERATOR.backend("triton").why_not(Call.of(torch.zeros(1)))
    if reason is not None:
        pytest.skip(reason)
    from rl_kernels.linear_logp.triton_lib import rows

    monkeypatch.setattr(rows, "LISTED", type(rows.LISTED)(request.param))


@pytest.mark.slow
def test_interpreted_kernels_draw_what_native_draws(interpreted: None) -> None:
    check_backend("triton", CPU, 4, 1301, step=4)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [300, 5003, 151936])
def test_gpu_draws_what_native_draws(gpu_backend: str, vocab: int) -> None:
    check_backend(gpu_backend, torch.device("cuda"), 40, vocab)
    check_small_top_p(gpu_backend, torch.device("cuda"))


def test_frequencies_are_the_kept_probabilities() -> None:
    """Chi-square with 4 degrees of freedom; 40000 draws from a seed."""
    row = torch.tensor([1.0, 0.5, -9.0, 0.0, 1.5, 1.0, -1.0])
    rows = row.expand(40000, -1)
    norm = torch.stack((rows.amax(1), (rows - 1.5).exp().sum(1).log()), 1)
    logits = LinearLogits(rows, norm, None, "native", torch.float32)
    found = logits.sample(top_k=5, temperature=1.3, generator=torch.Generator().manual_seed(1))
    counts = found.ids.bincount(minlength=7)
    assert counts[[2, 6]].tolist() == [0, 0]
    kept = (row / 1.3).double().softmax(0)[[0, 1, 3, 4, 5]]
    expected = 40000 * kept / kept.sum()
    # The 1e-4 quantile.
    assert ((counts[[0, 1, 3, 4, 5]] - expected).square() / expected).sum() < 23.5


def test_leading_dims_and_parameters_without_dims() -> None:
    draw = Draw(torch.float32)
    hidden, weight, u = draw.normal(2, 3, 8), draw.normal(90, 8), uniform_of(6).view(2, 3)
    found = linear_logits(hidden, weight).sample(top_p=torch.tensor(0.8), top_k=torch.tensor(9), uniform=u)
    flat = linear_logits(hidden.view(6, 8), weight).sample(top_p=0.8, top_k=9, uniform=u.view(6))
    assert all(same(one, other.view(2, 3)) for one, other in zip(found, flat, strict=True))
    alone = linear_logits(hidden[1, 2], weight).sample(top_p=0.8, top_k=9, uniform=u[1, 2])
    assert all(same(one, other[5]) for one, other in zip(alone, flat, strict=True))
    none = linear_logits(hidden[:0], weight).sample(top_p=0.8)
    assert [value.shape for value in none] == [(0, 3)] * 4


def test_generator_draws_the_uniform_numbers() -> None:
    logits = given("normal", 6, 90)
    found = logits.sample(generator=torch.Generator().manual_seed(3))
    u = torch.rand(6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert same(found.ids, logits.sample(uniform=u).ids)


def test_rows_without_a_distribution() -> None:
    logits = given("normal", 4, 90)
    logits.logits[0, 3], logits.logits[1], logits.logits[2, 1] = torch.nan, -math.inf, math.inf
    logits.norm[:3] = torch.nan
    with pytest.raises(ValueError, match="logits: expected no NaN"):
        logits.sample(top_p=0.5)
    found = logits.sample(top_p=0.5, top_k=3, validate=False)
    assert found.ids[:3].tolist() == [0, 0, 0]
    assert all(value[:3].isnan().all() and value[3].isfinite() for value in found[1:])


def test_compiled_in_one_graph() -> None:
    draw = Draw(torch.float32)
    hidden, weight, u = draw.normal(5, 16), draw.normal(300, 16), uniform_of(5)

    def sampled(hidden: torch.Tensor) -> Sampled:
        return linear_logits(hidden, weight).sample(top_p=0.9, top_k=8, temperature=0.7, uniform=u, validate=False)

    found = torch.compile(sampled, backend="aot_eager", fullgraph=True)(hidden)
    assert all(same(one, other) for one, other in zip(found, sampled(hidden), strict=True))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (dict(top_p=0.0), ValueError, r"top_p: expected a number in \(0, 1\]"),
        (dict(top_p=1.1), ValueError, "top_p"),
        (dict(top_k=-1), ValueError, "top_k: expected an integer >= 0"),
        (dict(top_k=1.5), TypeError, "top_k: expected an integer"),
        (dict(min_p=1.0), ValueError, r"min_p: expected a number in \[0, 1\)"),
        (dict(min_p=-0.1), ValueError, "min_p"),
        (dict(temperature=-1.0), ValueError, "temperature"),
        (dict(temperature=1e-40), ValueError, "temperature: expected 0, or a number"),
        (dict(temperature=math.nan), ValueError, "temperature"),
        (dict(top_p="x"), TypeError, "top_p: expected a number"),
        (dict(top_p=torch.ones(3)), ValueError, "top_p: expected shape"),
        (dict(top_k=torch.ones(4)), TypeError, "top_k: expected dtype"),
        (dict(top_p=torch.tensor([0.5, 0.0, 0.5, 0.5])), ValueError, "top_p: expected numbers in"),
        (dict(top_k=torch.tensor([1, 2, -1, 4])), ValueError, "top_k: expected integers >= 0"),
        (dict(min_p=torch.tensor(1.0)), ValueError, "min_p: expected numbers in"),
        (dict(temperature=torch.tensor([1.0, 1.0, math.inf, 1.0])), ValueError, "temperature: expected 0, or finite"),
        (dict(temperature=1.2e-38), ValueError, "logits: expected no NaN"),
        (dict(uniform=torch.tensor([0.0, 1.0, 0.5, 0.5])), ValueError, r"uniform: expected numbers in \[0, 1\)"),
        (dict(uniform=torch.zeros(3)), ValueError, "uniform: expected shape"),
        (dict(uniform=torch.zeros(4).half()), TypeError, "uniform: expected dtype"),
        (dict(uniform=torch.zeros(4), generator=torch.Generator()), ValueError, "generator: expected None"),
    ],
)
def test_invalid_arguments_raise(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        given("normal", 4, 90).sample(**arguments)


def test_logits_that_cannot_be_sampled_raise() -> None:
    hidden, weight = torch.randn(4, 16), torch.randn(90, 16)
    with pytest.raises(TypeError, match=r"logits: expected dtype float32, got torch\.float64"):
        linear_logits(hidden.double(), weight.double()).sample()
    logits = linear_logits(hidden, weight)
    logits.logits[0] = 0.0
    with pytest.raises(RuntimeError, match="logits: changed in place"):
        logits.sample()


@pytest.mark.smoke
def test_masses_follow_the_exponential() -> None:
    d = torch.cat((torch.linspace(0, 30, 10001), torch.tensor([0.0, 200.0, math.inf])))
    mass = drawing.masses(d).double() / 2**40
    assert mass[[-3, -2, -1]].tolist() == [1.0, 0.0, 0.0]
    # An FP32 product of d, the power, and the rounding down.
    assert ((mass - (-d.double()).exp()).abs() <= (-d.double()).exp() * (4e-7 + 6e-8 * d.clamp(max=40)) + 2**-40).all()
