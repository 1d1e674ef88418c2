"""Sequences that go on: whole, in pieces, token by token, packed, padded and forked they have the same bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from rl_kernels.core.operator import INVARIANT, Call
from rl_kernels.gated_delta import DeltaCache, causal_conv1d, gated_delta_rule, reference
from rl_kernels.gated_delta.constants import MOST_TOKENS
from rl_kernels.gated_delta.op import OPERATOR

pytestmark = pytest.mark.smoke
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALL = Call(torch.device(DEVICE), torch.float32, "cpu", {})
BACKENDS = [
    backend.name
    for backend in OPERATOR.backends
    if backend.why_not(CALL) is None and backend.promises[DEVICE] >= INVARIANT
]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
HEADS, SIZES = (1, 2), (16, 32)
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129)


def operands(tokens: int, batch: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """Return q, k, v, g and beta."""
    torch.manual_seed(seed)
    q, k = (torch.randn(batch, tokens, HEADS[0], SIZES[0]).to(DEVICE, dtype) for _ in range(2))
    v = torch.randn(batch, tokens, HEADS[1], SIZES[1]).to(DEVICE, dtype)
    g, beta = (torch.rand(batch, tokens, HEADS[1]).to(DEVICE) for _ in range(2))
    return [q, k, v, -0.3 * g, beta]


def empty(batch: int = 1, dtype: torch.dtype = torch.float32) -> DeltaCache:
    return DeltaCache.empty(batch, *HEADS, *SIZES, dtype=dtype, device=DEVICE)


def part(call: Sequence[torch.Tensor], first: int, end: int) -> list[torch.Tensor]:
    return [x[:, first:end] for x in call]


def in_pieces(call: list[torch.Tensor], cuts: Sequence[int], cache: DeltaCache, backend: str) -> torch.Tensor:
    """Return the output of pieces between the cuts, one after the other."""
    pieces = pairwise(cuts)
    return torch.cat([gated_delta_rule(*part(call, *cut), cache=cache, backend=backend) for cut in pieces], 1)


@each_backend
@pytest.mark.parametrize("tokens", LENGTHS)
def test_pieces_have_the_bits_of_the_whole(backend: str, tokens: int) -> None:
    call = operands(tokens, 2)
    whole = gated_delta_rule(*call, backend=backend)
    draw = random.Random(tokens)
    for _ in range(1 if backend == "triton" else 4):
        cuts = [0, *sorted(draw.randint(0, tokens) for _ in range(3)), tokens]
        cache = empty(2)
        assert torch.equal(in_pieces(call, cuts, cache, backend), whole), cuts
        assert cache.lengths.tolist() == [tokens] * 2


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_have_the_bits_of_the_whole(backend: str, dtype: torch.dtype) -> None:
    if backend == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies BF16 as integers")
    first, tokens = (59, 68) if backend == "triton" and DEVICE == "cpu" else (0, 130)
    call = operands(tokens, dtype=dtype)
    cache = empty(dtype=dtype)
    out = in_pieces(call, [0, *range(first, tokens + 1)] if first else range(tokens + 1), cache, backend)
    assert torch.equal(out, gated_delta_rule(*call, backend=backend))


@each_backend
def test_decayed_away_and_undecayed_pieces(backend: str) -> None:
    for largest, strength in ((0.0, 1.0), (1e-6, None), (20.0, None), (0.3, 0.0)):
        call = operands(70)
        call[3] = call[3] / 0.3 * largest
        call[4] = call[4] if strength is None else torch.full_like(call[4], strength)
        whole = gated_delta_rule(*call, backend=backend)
        assert whole.isfinite().all()
        assert torch.equal(in_pieces(call, [0, 21, 65, 66, 70], empty(), backend), whole)


@each_backend
def test_integers_that_are_not_checked_are_clamped(backend: str) -> None:
    bounds, start = torch.tensor([0, 8, 2, 10], device=DEVICE), torch.tensor([9, -3], device=DEVICE)
    for call, count, options, expected in (
        (operands(10), 3, {"cu_seqlens": bounds}, [8, 0, 8]),
        (operands(5, batch=2), 2, {"start": start}, [0, 5]),
    ):
        cache = empty(count)
        gated_delta_rule(*call, **options, cache=cache, validate=False, backend=backend)
        assert cache.lengths.tolist() == expected


@each_backend
def test_packed_and_padded_sequences_go_on(backend: str) -> None:
    counts = (5, 0, 66, 17)
    calls = [operands(count + 9, seed=count) for count in counts]
    alone = [gated_delta_rule(*call, backend=backend) for call in calls]
    cache = empty(len(counts))
    for first, ends in ((0, counts), (None, [count + 9 for count in counts])):
        pieces = [part(call, 0 if first == 0 else n, end) for call, n, end in zip(calls, counts, ends, strict=True)]
        bounds = torch.tensor([0, *(x[0].shape[1] for x in pieces)], device=DEVICE).cumsum(0).int()
        joined = [torch.cat(parts, 1) for parts in zip(*pieces, strict=True)]
        out = gated_delta_rule(*joined, cu_seqlens=bounds, cache=cache, backend=backend)
        for number, (n, end) in enumerate(zip(counts, ends, strict=True)):
            expected = alone[number][:, 0 if first == 0 else n : end]
            assert torch.equal(out[:, bounds[number] : bounds[number + 1]], expected)
    assert cache.lengths.tolist() == [count + 9 for count in counts]
    # Left padding in the prompt alone; NaN there is not read.
    start = torch.tensor([66 - count for count in counts], device=DEVICE)
    padded = [
        torch.cat([torch.cat((x.new_full((1, 66 - n, *x.shape[2:]), torch.nan), x[:, :n]), 1) for x, n in rows])
        for rows in ([(call[i], n) for call, n in zip(calls, counts, strict=True)] for i in range(5))
    ]
    cache = empty(len(counts))
    out = gated_delta_rule(*padded, start=start, cache=cache, backend=backend)
    later = [torch.cat([call[i][:, n : n + 1] for call, n in zip(calls, counts, strict=True)]) for i in range(5)]
    step = gated_delta_rule(*later, cache=cache, backend=backend)
    for number, n in enumerate(counts):
        assert torch.equal(out[number, 66 - n :], alone[number][0, :n])
        assert not out[number, : 66 - n].any()
        assert torch.equal(step[number, 0], alone[number][0, n])


@each_backend
def test_forks_and_crops_go_on(backend: str) -> None:
    call, other = operands(70), operands(70, seed=1)
    whole = gated_delta_rule(*call, backend=backend)
    cache = empty()
    in_pieces(call, [0, 51], cache, backend)
    cache = cache.select([0, 0])
    guesses = [torch.cat((x[:, 51:57], y[:, 51:57])) for x, y in zip(call, other, strict=True)]
    assert torch.equal(gated_delta_rule(*guesses, cache=cache, backend=backend)[:1], whole[:, 51:57])
    cache.crop([54, 51])
    both = [torch.cat((x[:, 54:60], x[:, 51:57])) for x in call]
    out = gated_delta_rule(*both, cache=cache, backend=backend)
    assert torch.equal(out[:1], whole[:, 54:60])
    assert torch.equal(out[1:], whole[:, 51:57])
    with pytest.raises(ValueError, match="lengths: expected"):
        cache.crop([60, 58])
    in_pieces(
        [torch.cat((x[:, 60:70], y[:, 57:67])) for x, y in zip(call, other, strict=True)], [0, 10], cache, backend
    )
    with pytest.raises(ValueError, match=r"lengths: expected \[64, 64\] to \[70, 67\], the tokens that"):
        cache.crop([63, 64])


@each_backend
def test_crop_to_every_row_of_the_chunk(backend: str) -> None:
    call, batch = operands(129), 64
    whole = gated_delta_rule(*call, backend=backend)
    cache = empty()
    in_pieces(call, [0, 127], cache, backend)
    cache = cache.select([0] * batch)
    cache.crop(range(64, 64 + batch))
    for step in range(2):
        token = [torch.cat([x[:, t : t + 1] for t in range(64 + step, 64 + step + batch)]) for x in call]
        out = gated_delta_rule(*token, cache=cache, backend=backend)
        assert torch.equal(out[:, 0], whole[0, 64 + step : 64 + step + batch])


@each_backend
def test_recurrent_states(backend: str) -> None:
    call = operands(150)
    whole = gated_delta_rule(*call, return_state=True, backend=backend)
    cache = empty()
    in_pieces(call, [0, 70, 128], cache, backend)
    state = cache.to_recurrent()
    assert torch.equal(state, cache.state)
    assert torch.equal(state, gated_delta_rule(*part(call, 0, 128), return_state=True, backend=backend).state)
    for again in (
        DeltaCache.from_recurrent(state, HEADS[0], dtype=torch.float32),
        DeltaCache.from_recurrent(state, HEADS[0], dtype=torch.float32, lengths=cache.lengths),
    ):
        out = in_pieces(call, [128, 129, 150], again, backend)
        assert torch.equal(out, whole.out[:, 128:])
        torch.testing.assert_close(again.to_recurrent(), whole.state, rtol=1e-5, atol=1e-6)
    out = gated_delta_rule(*part(call, 128, 150), initial_state=state, return_state=True, backend=backend)
    assert torch.equal(out.out, whole.out[:, 128:])
    assert torch.equal(out.state, whole.state)
    with pytest.raises(ValueError, match="lengths: expected multiples of 64"):
        DeltaCache.from_recurrent(state, HEADS[0], dtype=torch.float32, lengths=torch.tensor([3], device=DEVICE))
    with pytest.raises(ValueError, match="key_heads: expected a divisor of the 2 heads"):
        DeltaCache.from_recurrent(state, 3, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "edit", "error", "message"),
    [
        ("lengths", lambda x: x[:1], ValueError, r"cache.lengths: expected shape"),
        ("lengths", lambda x: x.long(), TypeError, r"cache.lengths: expected dtype"),
        ("lengths", lambda x: x - 1, ValueError, r"cache.lengths: expected values"),
        ("lengths", lambda x: x + (MOST_TOKENS - 3), ValueError, r"cache.lengths: expected values in \[0, 8388605\)"),
        ("state", lambda x: x[:1], ValueError, r"cache.state: expected shape"),
        ("state", lambda x: x.half(), TypeError, r"cache.state: expected dtype"),
        ("state", lambda x: x.mT, ValueError, r"cache.state: expected "),
        ("keys", lambda x: x.half(), TypeError, r"cache.keys: expected dtype"),
        ("residuals", lambda x: x[:, :1], ValueError, r"cache.residuals: expected shape"),
        ("decays", lambda x: x.to("meta"), ValueError, r"cache.decays: expected device"),
        ("inverse", lambda x: x[..., :8], ValueError, r"cache.inverse: expected shape"),
        ("residuals", lambda x: x[:1].expand(2, -1, -1, -1), ValueError, r"cache.residuals: expected"),
    ],
)
def test_bad_caches_are_named(name, edit, error, message) -> None:
    call, cache = operands(3, 2), empty(2)
    before = [x.clone() for x in cache]
    with pytest.raises(error, match=message):
        gated_delta_rule(*call, cache=cache._replace(**{name: edit(getattr(cache, name))}))
    assert all(map(torch.equal, cache, before))


def test_a_cache_has_no_gradients() -> None:
    call = operands(3)
    call[1].requires_grad_()
    with pytest.raises(ValueError, match="k: expected a tensor that does not require grad with cache"):
        gated_delta_rule(*call, cache=empty())
    with torch.no_grad():
        gated_delta_rule(*call, cache=empty())
    state = torch.zeros(1, HEADS[1], *SIZES, device=DEVICE)
    with pytest.raises(ValueError, match="initial_state: expected None with cache"):
        gated_delta_rule(*operands(3), cache=empty(), initial_state=state)
    with pytest.raises(ValueError, match="return_state: expected False with cache"):
        gated_delta_rule(*operands(3), cache=empty(), return_state=True)


def test_a_cache_is_cut_from_the_graph_of_its_state() -> None:
    call = operands(64)
    call[2].requires_grad_()
    state = gated_delta_rule(*call, return_state=True).state
    cache = DeltaCache.from_recurrent(state, HEADS[0], dtype=torch.float32)
    assert not any(x.requires_grad for x in cache)
    gated_delta_rule(*operands(3), cache=cache)
    for name in ("state", "decays"):
        attached = cache._replace(**{name: getattr(cache, name).clone().requires_grad_()})
        with pytest.raises(ValueError, match=f"cache.{name}: expected a tensor that does not require grad"):
            gated_delta_rule(*operands(3), cache=attached)


@each_backend
def test_a_graph_that_saved_a_cache_refuses_to_use_it(backend: str) -> None:
    cache = empty()
    for _ in range(2):
        x = torch.ones_like(cache.state).requires_grad_()
        product = x * cache.state
        gated_delta_rule(*operands(3), cache=cache, backend=backend)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_recurrent_states_under_autocast() -> None:
    cache = empty()
    gated_delta_rule(*operands(70), cache=cache)
    expected = cache.to_recurrent()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(cache.to_recurrent(), expected)


@pytest.mark.parametrize(
    ("sequences", "error", "message"),
    [
        ([True, False, True], TypeError, "sequences: expected integers"),
        (torch.tensor([True, False, True]), TypeError, "sequences: expected integers"),
        ([0.9], TypeError, "sequences: expected integers"),
        (torch.zeros(0), TypeError, "sequences: expected integers"),
        ([[0]], ValueError, "sequences: expected 1 dim"),
        ([3], ValueError, "sequences: expected values in"),
        ([-1], ValueError, "sequences: expected values in"),
    ],
)
def test_only_numbers_of_sequences_select(sequences, error, message) -> None:
    with pytest.raises(error, match=message):
        empty(3).select(sequences)
    assert len(empty(3).select([]).lengths) == 0


def test_lengths_are_not_narrowed() -> None:
    cache = empty(3)
    gated_delta_rule(*operands(5, 3), cache=cache)
    for lengths, error in (([0, 2**32, 0], ValueError), ([0.9] * 3, TypeError), ([True] * 3, TypeError)):
        with pytest.raises(error, match="lengths: expected"):
            cache.crop(lengths)
        assert cache.lengths.tolist() == [5] * 3
    cache.crop(torch.tensor([5, 0, 3], device=DEVICE))
    assert cache.lengths.tolist() == [5, 0, 3]
    for length in (2**32, MOST_TOKENS, -64):
        held = torch.full((3,), length, device=DEVICE)
        with pytest.raises(ValueError, match="lengths: expected multiples of 64 from 0 and below 8388608"):
            DeltaCache.from_recurrent(cache.state, HEADS[0], dtype=torch.float32, lengths=held)


def test_dtypes_of_caches_and_flags_are_checked() -> None:
    with pytest.raises(TypeError, match="dtype: expected one of"):
        empty(dtype=torch.int32)
    with pytest.raises(TypeError, match="validate: expected a bool"):
        gated_delta_rule(*operands(3), validate="no")
    with pytest.raises(TypeError, match="validate: expected a bool"):
        causal_conv1d(torch.zeros(1, 3, 8, device=DEVICE), torch.zeros(8, 4, device=DEVICE), validate="no")


def test_definition_by_hand() -> None:
    q = k = torch.tensor([1.0, 0.0]).repeat(1, 2, 1, 1).double()
    v = torch.tensor([[2.0, 4.0], [6.0, 8.0]]).view(1, 2, 1, 2).double()
    half = torch.full((1, 2, 1), 0.5).double()
    out, state = reference.gated_delta_rule(q, k, v, half.log(), half, scale=1.0, normalize_qk=False, return_state=True)
    # The state is 1, 2; then half of it, 0.5, 1, is moved half the way to 6, 8.
    assert out.flatten().tolist() == [1.0, 2.0, 3.25, 4.5]
    assert state.flatten().tolist() == [3.25, 4.5, 0.0, 0.0]
