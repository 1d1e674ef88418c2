"""The CUDA C++ backend: what is compiled, and on a GPU that no bit follows addresses, strides or splits."""

import pytest
import torch

from rl_kernels.core.calls import forget
from rl_kernels.core.cuda import where
from rl_kernels.core.operator import Call
from rl_kernels.fused_logp import fused_logp
from rl_kernels.fused_logp.backends.cuda import backend as cuda_backend
from rl_kernels.fused_logp.op import OPERATOR
from rl_kernels.lab.check.compare import bits

BACKEND = "cuda-generic"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("arch", "files"), [("sm_80", 2), ("sm_90", 2), ("sm_90a", 0), ("sm_100a", 0)])
def test_programs_of_a_target(arch, files):
    programs = cuda_backend.programs(arch)
    assert len(set(programs)) == len(programs) == files * 12
    assert {program.arch for program in programs} <= {arch}


def test_too_many_columns_are_refused(monkeypatch):
    monkeypatch.setattr(where, "missing", lambda *_: None)
    call = Call(torch.device("cuda", 0), torch.bfloat16, "sm90", {"V": 1 << 31})
    assert "2147483648" in OPERATOR.backend("cuda-generic").limits(call)


def results(logits, ids, **options):
    x = logits.detach().requires_grad_()
    found = fused_logp(x, ids, return_stats=True, backend=BACKEND, **options)
    up = torch.linspace(-1, 1, 3 * len(ids), device="cuda").view(3, -1)
    return [*(value.detach() for value in found), *torch.autograd.grad(list(found), x, list(up))]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert bits(a, b).passed


def drawn(rows, vocab, dtype):
    torch.manual_seed(rows + vocab)
    return torch.randn(rows, vocab, device="cuda").to(dtype), torch.randint(vocab, (rows,), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_alignment_and_strides_change_no_bit(dtype):
    logits, ids = drawn(5, 9001, dtype)
    expected = results(logits, ids)
    for offset in range(9):
        memory = torch.full((5 * 9001 + 16,), 1e4, device="cuda").to(dtype)
        moved = memory[offset : offset + 5 * 9001].view(5, 9001).copy_(logits)
        assert_same(results(moved, ids), expected)
    apart = torch.full((5, 2, 9001, 3), 1e4, device="cuda").to(dtype)[:, 1, :, 2].copy_(logits)
    assert_same(results(apart, ids), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [5000, 8193, 40000])
def test_rows_and_segments_give_the_same_bits(vocab, monkeypatch):
    logits, ids = drawn(2100, vocab, torch.bfloat16)
    expected = results(logits, ids)
    shares = (lambda _: 1, lambda _: 3)
    for name, value in (("SPLIT_BELOW", 1 << 30), *(("sharing", share) for share in shares), ("MOST_UNITS", 1)):
        with monkeypatch.context() as changed:
            changed.setattr(cuda_backend, name, value)
            forget()
            assert_same(results(logits, ids), expected)
    forget()
    for rows in (slice(1), slice(7, 20), slice(2000, 2100)):
        part = fused_logp(logits[rows], ids[rows], return_stats=True, backend=BACKEND)
        assert_same(part, [value[rows] for value in expected[:3]])
