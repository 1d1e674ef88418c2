"""The CUDA C++ backends: what is compiled, and on a GPU that no bit follows addresses, strides, splits or who reads."""

import pytest
import torch

from rl_kernels.core.cuda import where
from rl_kernels.core.operator import Call
from rl_kernels.core.testing.launched import Launched, owns
from rl_kernels.fused_logp import canary, fused_logp
from rl_kernels.fused_logp.backends.cuda import backend as cuda_backend
from rl_kernels.fused_logp.op import OPERATOR
from rl_kernels.fused_logp.spec.cases import SPEC
from rl_kernels.lab.check.compare import bits

BACKENDS = ("cuda-sm90", "cuda-generic")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("backend", "arch", "files"),
    [
        ("cuda-generic", "sm_80", 2),
        ("cuda-generic", "sm_90a", 0),
        ("cuda-sm90", "sm_90", 2),
        ("cuda-sm90", "sm_90a", 1),
        ("cuda-sm90", "sm_80", 0),
        ("cuda-sm90", "sm_100a", 0),
    ],
)
def test_programs_of_a_target(backend, arch, files):
    programs = OPERATOR.backend(backend).load().programs(arch)
    assert len(set(programs)) == len(programs) == files * 6
    assert {program.arch for program in programs} <= {arch}


def test_cases_and_canary_reach_the_bulk_copies(monkeypatch):
    sizes = [(case.sizes["batch"] * case.sizes["seq"], case.sizes["vocab"]) for case in SPEC.cases if case.gpu]
    called = []
    monkeypatch.setattr(canary, "fused_logp", lambda logits, *_, **__: called.append(logits) or ())
    list(canary.results(torch.bfloat16, torch.device("cpu"), "cuda-sm90"))
    *_, last = called
    assert last.stride(1) == 1
    for rows, vocab in (*sizes, last.shape):
        assert rows >= cuda_backend.SPLIT_BELOW
        assert vocab >= cuda_backend.SHORT


@pytest.mark.parametrize("file", [cuda_backend.GENERIC, cuda_backend.GRADIENT, cuda_backend.SM90])
def test_a_shared_program_belongs_to_the_generic_backend(file):
    is_bulk = file == cuda_backend.SM90
    kernel = Launched(cuda_backend.PACKAGE, f"{file}.cu", "any", "sm_90a" if is_bulk else "sm_90")
    assert owns(OPERATOR.backend("cuda-sm90"), "sm90")(kernel) is is_bulk
    assert owns(OPERATOR.backend("cuda-generic"), "sm90")(kernel) is not is_bulk


def test_columns_are_counted_in_32_bits(monkeypatch):
    monkeypatch.setattr(where, "missing", lambda *_: None)
    call = Call(torch.device("cuda", 0), torch.bfloat16, "sm90", {"V": 1 << 31})
    assert "2147483648" in OPERATOR.backend("cuda-sm90").limits(call)


def results(logits, ids, backend, **options):
    x = logits.detach().requires_grad_()
    found = fused_logp(x, ids, return_stats=True, backend=backend, **options)
    up = torch.linspace(-1, 1, 3 * len(ids), device="cuda").view(3, -1)
    return [*(value.detach() for value in found), *torch.autograd.grad(list(found), x, list(up))]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert bits(a, b).passed


@pytest.fixture
def drawn():
    def draw(rows, vocab, dtype):
        torch.manual_seed(rows + vocab)
        logits = torch.randn(rows, vocab, device="cuda").to(dtype)
        return logits, torch.randint(vocab, (rows,), device="cuda")

    return draw


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 1000, 1024, 4095, 8200, 33333, 65536, 151936])
def test_both_backends_give_the_same_bits(drawn, vocab, dtype):
    logits, ids = drawn(11, vocab, dtype)
    assert_same(*(results(logits, ids, backend) for backend in BACKENDS))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_where_a_row_begins_changes_no_bit(drawn, backend, dtype):
    logits, ids = drawn(5, 9001, dtype)
    expected = results(logits, ids, backend)
    for offset in range(9):
        memory = torch.full((5 * 9001 + 16,), 1e4, device="cuda").to(dtype)
        moved = memory[offset : offset + 5 * 9001].view(5, 9001).copy_(logits)
        assert_same(results(moved, ids, backend), expected)
    apart = torch.full((5, 2, 9001, 3), 1e4, device="cuda").to(dtype)[:, 1, :, 2].copy_(logits)
    assert_same(results(apart, ids, backend), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [5000, 8193, 40000])
def test_rows_and_segments_give_the_same_bits(drawn, backend, vocab, monkeypatch):
    logits, ids = drawn(2100, vocab, torch.bfloat16)
    expected = results(logits, ids, backend)
    for name, value in (
        ("SPLIT_BELOW", 1 << 30),
        ("sharing", lambda _: 1),
        ("sharing", lambda _: 3),
        ("MOST_UNITS", 1),
        ("SHORT", 0),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(cuda_backend, name, value)
            assert_same(results(logits, ids, backend), expected)
    for rows in (slice(1), slice(7, 20), slice(2000, 2100)):
        part = fused_logp(logits[rows], ids[rows], return_stats=True, backend=backend)
        assert_same(part, [value[rows] for value in expected[:3]])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_left_out_are_not_read(drawn, backend):
    logits, ids = drawn(3000, 4100, torch.bfloat16)
    kept = torch.randint(3000, (700,), device="cuda")
    expected = results(logits, ids, backend)
    left = torch.ones(3000, dtype=torch.bool, device="cuda").index_fill_(0, kept, False)
    logits = logits.masked_fill(left[:, None], torch.nan)
    found = results(logits, ids, backend, row_indices=kept)
    ignored = results(logits, ids.masked_fill(left, -100), backend, ignore_index=-100)
    assert_same(found, ignored)
    assert_same([value[kept] for value in found], [value[kept] for value in expected])
    assert all(not bool(value[left].any()) for value in found)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_elements_than_32_bits_count(backend):
    rows, vocab = 17_000, 131_072
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_()
    ids = torch.randint(vocab, (rows,), device="cuda")
    last = logits.detach()[-3:].clone().requires_grad_()
    whole, alone = (fused_logp(x, i, backend=backend) for x, i in ((logits, ids), (last, ids[-3:])))
    assert bits(whole[-3:], alone).passed
    (grad,), (expected,) = (torch.autograd.grad(y.sum(), x) for y, x in ((whole, logits), (alone, last)))
    assert bits(grad[-3:], expected).passed
