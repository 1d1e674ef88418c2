"""Logits in CUDA C++: what is compiled and refused; on a GPU, that bits follow no rows, parts or places."""

import pytest
import torch

from rl_kernels.core.calls import forget
from rl_kernels.core.cuda import where
from rl_kernels.core.cuda.gemm.ahead import programs_of
from rl_kernels.core.operator import Call
from rl_kernels.core.triton_lib import launch
from rl_kernels.lab.check.compare import bits
from rl_kernels.linear_logp import Memory, linear_logp
from rl_kernels.linear_logp.backends.cuda_sm90 import given
from rl_kernels.linear_logp.backends.cuda_sm90 import tiles as cuda_tiles
from rl_kernels.linear_logp.op import OPERATOR

BACKEND = "cuda-sm90"
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def hopper():
    """Skip where there is no Hopper GPU; return the backend's module."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] != 9:
        pytest.skip("needs sm_90")
    return OPERATOR.backend(BACKEND).load()


def test_programs_of_a_target():
    backend = OPERATOR.backend(BACKEND).load()
    of_products = set(programs_of("sm_90a"))
    assert of_products
    programs = [one for one in backend.programs("sm_90a") if one not in of_products]
    cuts = {cuda_tiles.Cut.of(count) for count in range(1, 300)}
    # One draws tokens. Forward, forward that keeps logits, and backward; with entropy, cap and thresholds or without.
    assert len(set(programs)) == len(programs) == 1 + len(HALVES) * 3 * 2**3 * len(cuts)
    assert not any(backend.programs(arch) for arch in ("sm_80", "sm_90", "sm_100a"))


def test_cubins_are_in_the_packages_of_the_programs(monkeypatch):
    asked = []
    monkeypatch.setattr(where, "missing", lambda packages, *_: asked.append(packages))
    backend = OPERATOR.backend(BACKEND)
    backend.why_not(Call(torch.device("cuda", 0), torch.bfloat16, "sm90", {"D": 64, "V": 100}))
    assert set(asked[0]) == {program.package for program in backend.load().programs("sm_90a")}


@pytest.mark.parametrize(
    ("dtype", "size", "reason"),
    [
        (torch.float32, 64, "multiplies BF16 and FP16"),
        (torch.bfloat16, 68, "D is 68"),
        (torch.float16, 0, "D is 0"),
        (torch.bfloat16, 64, None),
        (torch.bfloat16, None, None),
    ],
)
def test_unsupported_calls_are_refused_with_a_reason(monkeypatch, dtype, size, reason):
    monkeypatch.setattr(where, "missing", lambda *_: None)
    monkeypatch.setattr(launch, "INSTALLED", False)
    # A call of any size has no traits.
    traits = {} if size is None else {"D": size, "V": 100}
    result = OPERATOR.backend(BACKEND).limits(Call(torch.device("cuda", 0), dtype, "sm90", traits))
    assert result is None if reason is None else reason in result


def drawn(rows, size, vocab, dtype=torch.bfloat16):
    torch.manual_seed(rows + vocab)
    hidden = torch.randn(rows, size, device="cuda").to(dtype)
    weight = (torch.randn(vocab, size, device="cuda") / size**0.5).to(dtype)
    return hidden, weight, torch.randint(vocab, (rows,), device="cuda")


def same(result, expected):
    return all(bits(a, b).passed for a, b in zip(result, expected, strict=True))


def both(backend_name, hidden, weight, ids, bias=None, **options):
    """Return the statistics and the gradients of a call."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    options = {"temperature": 0.7, "return_stats": True, "backend": backend_name, **options}
    stats = linear_logp(leaves[0], leaves[1], ids, bias=leaves[2], **options)
    rows = torch.arange(len(hidden), device="cuda") % 7 - 3.5
    sum((value * rows * scale).sum() for value, scale in zip(stats, (1.0, 0.3, 0.1), strict=True)).backward()
    return [*(value.detach() for value in stats), *(leaf.grad for leaf in leaves if leaf is not None)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("vocab", "size"),
    # Stages of a tile: fewer than the ring has, as many, more, and twice as many.
    [*((vocab, 264) for vocab in (1, 255, 257, 1025, 5500, 40000)), *((5500, size) for size in (8, 136, 520, 640))],
)
@pytest.mark.parametrize("dtype", HALVES)
def test_parts_and_blocks_change_no_bit(hopper, monkeypatch, vocab, size, dtype):
    hidden, weight, ids = drawn(300, size, vocab, dtype)
    bias = torch.randn(vocab, device="cuda").to(dtype)
    expected = both(BACKEND, hidden, weight, ids, bias)
    # On few processors a part is four blocks, of 5500 columns two in the last one; on many it is one.
    few, many = (lambda _, count=count: count for count in (2, 10_000))
    changes = [
        *((cuda_tiles, "processors", value) for value in (few, many)),
        (hopper, "MOST_ROWS", 70),
    ]
    for place, name, value in changes:
        with monkeypatch.context() as changed:
            changed.setattr(place, name, value)
            forget()
            assert same(both(BACKEND, hidden, weight, ids, bias), expected), name
    forget()
    for rows in (slice(1), slice(7, 72), slice(299, 300)):
        part = linear_logp(
            hidden[rows], weight, ids[rows], bias=bias, temperature=0.7, return_stats=True, backend=BACKEND
        )
        assert same(part, [value[rows] for value in expected[:3]])


@pytest.mark.gpu
@pytest.mark.parametrize("ignored", [slice(0, 40), slice(130, 700), slice(250, 1000), slice(0, 1000)], ids=str)
def test_skipped_rows_change_no_bit(hopper, ignored):
    hidden, weight, ids = drawn(1000, 264, 5003)
    whole = both(BACKEND, hidden, weight, ids)
    ids[ignored] = -100
    hidden[ignored] = torch.nan
    result = both(BACKEND, hidden, weight, ids, ignore_index=-100)
    kept = torch.ones(1000, device="cuda", dtype=torch.bool)
    kept[ignored] = False
    for value, expected in zip(result[:4], whole[:4], strict=True):
        assert same([value[kept]], [expected[kept]])
        assert not value[~kept].any()
    # The gradient of the weight sums over tokens: that of the others alone, in their places.
    assert not result[4].isnan().any()
    cleaned = hidden.masked_fill(~kept[:, None], 0.0)
    assert same(both(BACKEND, cleaned, weight, ids, ignore_index=-100)[4:], result[4:])


@pytest.mark.gpu
def test_pieces_and_blocks_of_rows_change_no_bit(hopper, monkeypatch):
    from rl_kernels.linear_logp import backward

    hidden, weight, ids = drawn(300, 264, 5003)
    bias, temperature = torch.randn(5003, device="cuda").bfloat16(), torch.rand(300, device="cuda") + 0.5
    ids[20:290:3] = -100
    options = {"temperature": temperature, "ignore_index": -100}
    expected = both(BACKEND, hidden, weight, ids, bias, **options)
    assert same(both(BACKEND, hidden, weight, ids, bias, memory=Memory(1), **options), expected)
    monkeypatch.setattr(backward, "LEAST_HEIGHT", 128)
    forget()
    assert same(both(BACKEND, hidden, weight, ids.int(), bias, memory=Memory(1), **options), expected)


def test_only_rows_that_tma_cannot_read_are_copied():
    x = torch.randn(6, 64).bfloat16()
    for fits in (x, x[2:], x[:, 8:56]):
        assert cuda_tiles.copyable(fits) is fits
    for other in (x[:, 1:], x[:, :60].clone(), x[:, ::2], x.t(), x[:1].expand(6, 64)):
        copied = cuda_tiles.copyable(other)
        assert torch.equal(copied, other)
        assert copied.data_ptr() != other.data_ptr()


def test_only_logits_that_are_not_read_by_quads_are_copied():
    x = torch.randn(6, 64)
    for fits in (x, x[:, :61], x[1:, 4:]):
        assert given.by_quads(fits) is fits
    for other in (x[:, 2:], x[:, :62].clone(), x[:, ::2], x.t()[:, :5]):
        copied = given.by_quads(other)
        assert torch.equal(copied, other)
        assert given.by_quads(copied) is copied
