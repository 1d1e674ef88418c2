"""The vocabulary shared by ranks, as a virtual group in one process: every rank's part has the bits of one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from rl_kernels.core.operator import Call as Described
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.testing import IGNORED, Draw, bits_of
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.linear_logp import vocab_shards
from rl_kernels.linear_logp.op import OPERATOR, describe, ops
from rl_kernels.linear_logp.spec import virtual
from rl_kernels.linear_logp.vocabulary import has_empty_segments, shard_of

MODULES = tuple(f"rl_kernels.linear_logp.{name}" for name in ("inputs", "backward", "backends.native"))
BUGS = (
    Bug("units of ranks in the opposite order", "gathered[:, :-1]", "gathered.flip(0)[:, :-1]"),
    Bug("ids counted from the shard", "target_ids, block.start + columns", "target_ids, columns"),
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANKS = (1, 2, 4, 8)
INTERPRETED = ("triton", "cpu")
"""A backend and a device where each launch takes long: few calls, few sizes."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {"vocab": 1},
    {"vocab": 300, "bias": True, "entropy": True},
    {"vocab": 1025, "entropy": True, "ignored": IGNORED, "temperature": True},
    {"vocab": 5000, "bias": True, "cap": (5.0, 0.3), "entropy": True, "dtype": torch.bfloat16},
    {"vocab": 9001, "bias": True, "temperature": True, "ignored": 7, "ids": torch.int32, "entropy": True},
    {"vocab": 8192, "bad": True, "rows": 3},
    {"vocab": 16411, "rows": 70, "dtype": torch.bfloat16, "masked": 9000, "entropy": True},
    {"vocab": 9001, "rows": 0, "entropy": True},
    {"vocab": 6000, "zero": 1e-30, "entropy": True},
    {"vocab": 700, "zero": 1e-4, "entropy": True, "dtype": torch.float16},
    {"vocab": 16384},
    {"vocab": 9001, "rows": 40, "bias": True, "dtype": torch.bfloat16, "join": 16},
    {"vocab": 9001, "bias": True, "temperature": True, "ignored": 7, "entropy": True, "least": True},
)
"""Vocabularies smaller than a unit, with empty segments and shards, of odd size, with short and with full shards."""


def drawn(options: dict[str, Any], device: str = DEVICE) -> tuple[Any, list[torch.Tensor]]:
    """Return the inputs of a call, and upstream gradients of the three statistics."""
    rows, vocab, dtype = options.get("rows", 9), options["vocab"], options.get("dtype", torch.float32)
    size = options.get("size", 16)
    draw = Draw(dtype, device, seed=vocab)
    ids = draw.ids(vocab, rows).to(options.get("ids", torch.int64))
    # Columns at both sides of the boundaries of shards.
    edges = [edge for bounds in vocab_shards(vocab, 8) for edge in (bounds[0], bounds[1] - 1) if 0 <= edge < vocab]
    ids[: min(len(edges), rows)] = torch.tensor(edges, dtype=ids.dtype, device=device)[:rows]
    if "ignored" in options:
        ids[rows // 2] = options["ignored"]
    if "bad" in options:
        ids[0], ids[1] = vocab, -5
    bias = draw.normal(vocab) if "bias" in options else None
    if "masked" in options:
        bias = draw.normal(vocab)
        bias[: options["masked"]] = -torch.inf
    weight = draw.normal(vocab, size, scale=size**-0.5)
    upstream = [draw.normal(rows, dtype=torch.float32) for _ in range(3)]
    if "zero" in options:
        # Each chain underflows to -0, and the sum is +0 only if an empty segment is added; in FP16, before rounding.
        weight = torch.full_like(weight, options["zero"])
        upstream = [upstream[0].zero_(), torch.full_like(upstream[1], -options["zero"]), upstream[2].zero_()]
    scale = draw.uniform(0.5, 2.0, rows, dtype=torch.float32)
    temperature = scale if "temperature" in options else torch.tensor(0.7)
    cap = torch.tensor(options["cap"], dtype=torch.float64) if "cap" in options else None
    hidden = draw.normal(rows, size)
    least = draw.normal(rows, dtype=torch.float32) if "least" in options else None
    return virtual.Call(hidden, weight, ids, bias, temperature, options.get("ignored"), cap, least), upstream


def same(result: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    assert result.dtype == expected.dtype, what
    assert result.shape == expected.shape, what
    nan = result.isnan()
    assert torch.equal(nan, expected.isnan()), what
    assert torch.equal(bits_of(result)[~nan], bits_of(expected)[~nan]), what


def segmented(call: Any, saved: list[Any], backend: str) -> torch.Tensor:
    """Return the gradient of hidden as the contract defines it: eight chains, each from 0, added by a balanced tree."""
    vocab, width = len(call.weight), 1024 * -(-len(call.weight) // 8192)
    chains = []
    for first in range(0, 8 * width, width):
        part = slice(min(first, vocab), min(first + width, vocab))
        weight, bias = call.weight[part], None if call.bias is None else call.bias[part]
        shard = call._replace(weight=weight, bias=bias)
        arguments = (*shard, *saved, part.start, vocab, 1, True, None, 256, [True, False, False], None, False, backend)
        chains.append(ops["backward"](*arguments)[0])
    a, b, c, d, e, f, g, h = chains
    return (((a + b) + (c + d)) + ((e + f) + (g + h))).to(call.hidden.dtype)


def check_case(options: dict[str, Any], backend: str) -> None:
    """Compare a virtual group of every size with one process, bit by bit."""
    call, upstream = drawn(options)
    vocab, entropy = len(call.weight), bool(options.get("entropy"))
    logp, lse, row_entropy, norm, _ = ops["forward_stats"](*call, 0, backend)
    for value, plain in zip(ops["forward"](*call, 0, backend)[:2], (logp, norm), strict=True):
        same(value, plain)
    grads = upstream if entropy else [upstream[0], None, None]
    saved, needed = [norm, row_entropy if entropy else None, None, *grads], [True, True, call.bias is not None]
    rest = False, None, 256, needed, options.get("join"), False, backend
    whole = [ops["backward"](*call, *saved, 0, vocab, segments, *rest) for segments in (1, 8)]
    for value, plain in zip(whole[1][1:], whole[0][1:], strict=True):
        same(value, plain, "weight and bias")
    same(whole[1][0], segmented(call, saved, backend), "segments")
    few = (backend, DEVICE) == INTERPRETED
    for ranks in (2, 8) if few else RANKS:
        packed = virtual.states(call, ranks, entropy, backend)
        result = virtual.finish(call, packed, entropy, backend)
        expected = (logp, lse, row_entropy, norm) if entropy else (logp, lse[:0], row_entropy[:0], norm)
        for value, plain in zip(result, expected, strict=True):
            same(value, plain, ranks)
        # A workspace of 1 MiB has blocks of 64 rows.
        for workspace_mib in (256,) if few or len(call.hidden) <= 64 else (1, 256):
            parts = virtual.backward(call, ranks, saved, needed, backend, workspace_mib, options.get("join"))
            for value, plain in zip(parts, whole[1], strict=True):
                same(value, plain, (ranks, workspace_mib))


def calls() -> Iterator[Any]:
    for backend in OPERATOR.backends:
        half = {"dtype": torch.bfloat16} if backend.name == "cuda-sm90" else {}
        like = torch.zeros(1, 8, device=DEVICE, **half)
        reason = backend.why_not(Described.of(like, D=8))
        marks = [pytest.mark.skipif(reason is not None, reason=str(reason)), *[pytest.mark.gpu] * like.is_cuda]
        for options in OPTIONS[1:3] if (backend.name, DEVICE) == INTERPRETED else OPTIONS:
            yield pytest.param(backend.name, {**options, **half}, marks=marks)


@pytest.mark.parametrize(("backend", "options"), calls())
def test_ranks_have_the_bits_of_one_process(backend: str, options: dict[str, Any]) -> None:
    check_case(options, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 64, 300, 5000])
@pytest.mark.parametrize("vocab", [700, 5003, 40000, 151936])
def test_ranks_have_the_bits_of_one_gpu(gpu_backend: str, rows: int, vocab: int) -> None:
    for more in ({}, {"bias": True, "temperature": True, "ignored": IGNORED, "cap": (30.0, 0.02), "least": True}):
        for dtype in (torch.bfloat16, torch.float16):
            check_case(
                {"vocab": vocab, "rows": rows, "size": 136, "dtype": dtype, "entropy": bool(more), **more}, gpu_backend
            )


@pytest.mark.parametrize(("entropy", "dtype"), [(True, torch.bfloat16), (False, torch.float64)])
def test_opcheck_of_shards(entropy: bool, dtype: torch.dtype) -> None:
    # A multiple of 256, because what pads kept logits is not defined.
    call, upstream = drawn({"vocab": 3072, "bias": True, "dtype": dtype}, "cpu")
    call = call._replace(temperature=call.temperature.to(compute_dtype(dtype)))
    shard, raw = call.shard((2048, 3072)), torch.ops.rl_kernels
    for saved_mib in (0, 1):
        torch.library.opcheck(raw.linear_logp_states.default, (*shard, 2048, 4, entropy, saved_mib, "native"))
    packed, kept = ops["states"](*shard, 2048, 4, entropy, 1, "native")
    arguments = call.target_ids, call.temperature, None, 3072, entropy, "native"
    torch.library.opcheck(raw.linear_logp_finish.default, (torch.stack([packed, packed]), *arguments))
    norm = torch.zeros(len(call.hidden), 2, dtype=packed.dtype)
    for partial_sum, needed, logits in ((True, [True, False, True], None), (False, [True, True, False], kept)):
        saved = norm, None, logits, upstream[0].to(packed.dtype), None, None
        more = 2048, 3072, 8, partial_sum, None, 256, needed, None if partial_sum else 16, False, "native"
        torch.library.opcheck(raw.linear_logp_backward.default, (*shard, *saved, *more))


def check_all() -> None:
    for options in OPTIONS:
        check_case(options, "native")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_fails_in_a_virtual_group(bug: Bug) -> None:
    with planted(MODULES, bug), pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        check_all()


def test_shards_are_whole_segments() -> None:
    for vocab in (1, 1023, 1024, 1025, 7168, 8192, 8193, 32000, 128256, 151936):
        segments = vocab_shards(vocab, 8)
        assert has_empty_segments(vocab) == any(start == stop for start, stop in segments)
        for ranks in RANKS:
            shards = vocab_shards(vocab, ranks)
            assert shards[0][0] == 0
            assert shards[-1][1] == vocab
            assert all(one[1] == other[0] for one, other in pairwise(shards))
            assert all(start % 1024 == 0 or start == vocab for start, _ in shards)
            each = 8 // ranks
            assert shards == tuple((segments[i * each][0], segments[i * each + each - 1][1]) for i in range(ranks))


@pytest.mark.parametrize(("vocab", "n", "match"), [(0, 2, "vocab_size"), (1.5, 2, "vocab_size"), (100, 3, "n: ")])
def test_vocab_shards_raises(vocab: Any, n: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        vocab_shards(vocab, n)


class Ranks:
    """Stands for a process group: this process has a rank of ``ranks``."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.size = lambda: rank, lambda: ranks


@pytest.mark.parametrize(
    ("rank", "rows", "vocab", "cuts"),
    [
        # vocab_shards, without pad rows and with them.
        (0, 65536, 128256, None),
        (1, 62720, 128256, None),
        (1, 65536, 128256, (0, 65536, 128256)),
        # Even, with a short last shard, and padded.
        (0, 64128, 128256, (0, 64128, 128256)),
        (1, 75967, 151935, (0, 75968, 151935)),
        (1, 64255, 128256, (0, 64255, 128256)),
    ],
)
def test_cuts_are_found_from_the_rows(rank: int, rows: int, vocab: int, cuts: tuple[int, ...] | None) -> None:
    shard = shard_of(rows, Ranks(rank, 2), vocab, None)
    assert shard.cuts == cuts
    assert shard.start == vocab_shards(vocab, 2)[rank][0]


@pytest.mark.parametrize(
    ("rank", "rows", "vocab", "match"),
    [
        (0, 64256, 128256, r"lm_head_weight: expected 65536 rows, .* or 64128 to 64255 of a vocabulary that is cut"),
        (1, 75966, 151935, r"lm_head_weight: expected 74111 rows, .* or 75967 to 76095 of"),
        (
            2,
            1404,
            5500,
            r"vocab_size: expected VocabCuts, because 1404 rows on rank 2 fit \(0, 2048, 4096, 5500, 5500\)",
        ),
    ],
)
def test_rows_that_fit_no_cut_or_two(rank: int, rows: int, vocab: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        shard_of(rows, Ranks(rank, 4 if vocab == 5500 else 2), vocab, None)


@pytest.mark.parametrize("segments", range(1, 9))
def test_gradient_of_hidden_is_a_balanced_sum_of_segments(segments: int) -> None:
    call, upstream = drawn({"vocab": 1024 * segments - 5, "rows": 3})
    norm = ops["forward"](*call, 0, "native")[1]
    saved = [norm, None, None, upstream[0], None, None]
    whole, _, _ = ops["backward"](
        *call, *saved, 0, len(call.weight), 8, False, None, 256, [True, False, False], None, False, "native"
    )
    same(whole, segmented(call, saved, "native"))


def test_the_choice_of_a_backend_sees_the_sizes_of_the_whole_vocabulary() -> None:
    hidden, weight, bias = torch.ones(3, 16), torch.ones(70, 16), torch.ones(70)
    assert dict(describe(hidden, weight).traits) == {"D": 16, "V": 70}
    assert dict(describe(hidden, weight, bias=bias, vocab_size=280).traits) == {"D": 16, "V": 280}


def test_the_note_is_of_the_product_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_kernels.core.products.note", lambda *sizes: sizes)
    note, call = OPERATOR.backend("native").note, describe(torch.ones(3, 16), torch.ones(70, 16))
    assert note(call) == (16, 70, torch.float32)
    assert note(replace(call, traits={"D": 16, "V": 5000})) == (16, 1024, torch.float32)
    others = {"device": torch.device("cuda", 0)}, {"dtype": torch.float64}, {"traits": {"D": 16}}
    assert not any(note(replace(call, **other)) for other in others)
