"""det_attention beyond the conformance tests: gradients beside a cache, what is asked of the device, compiled calls."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from rl_kernels.attention import Attended, checks, det_attention
from rl_kernels.attention.backends.native import backend as native
from rl_kernels.attention.backends.native import batches
from rl_kernels.attention.inputs import UNLIMITED, Inputs
from rl_kernels.attention.op import OPERATOR
from rl_kernels.lab.check.conformance import device
from rl_kernels.lab.check.relations.integration import RawCalls


def operands(batch=2, queries=3, keys=20, heads=4, kv_heads=2, head=8):
    source = torch.Generator().manual_seed(5)
    shapes = ((batch, queries, heads, head), (batch, keys, kv_heads, head), (batch, keys, kv_heads, head))
    return [torch.randn(shape, generator=source) for shape in shapes]


def test_the_gradient_of_queries_beside_a_cache_is_that_of_its_keys_alone():
    q, k, v = operands()
    upstream, used = torch.randn_like(q), torch.tensor([20, 11])
    leaf = q.clone().requires_grad_()
    (found,) = torch.autograd.grad(det_attention(leaf, k, v, causal=True, seqused_k=used), leaf, upstream)
    for b, count in enumerate(used.tolist()):
        alone = q[b : b + 1].clone().requires_grad_()
        out = det_attention(alone, k[b : b + 1, :count], v[b : b + 1, :count], causal=True)
        assert torch.equal(found[b : b + 1], torch.autograd.grad(out, alone, upstream[b : b + 1])[0])


@pytest.mark.smoke
def test_a_call_is_not_causal_by_default():
    q, k, v = operands(2, 20, 20)
    bits = det_attention(q, k, v)
    assert torch.equal(bits, det_attention(q, k, v, causal=False))
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(bits, expected)


def test_limits_of_kernels_are_of_the_widest_head_and_the_largest_group(monkeypatch):
    monkeypatch.setattr("rl_kernels.core.cuda.where.missing", lambda *_: None)
    monkeypatch.setattr("rl_kernels.core.triton_lib.launch.INSTALLED", True)

    def takers(heads, size, size_v, dtype=torch.bfloat16):
        q, k = torch.empty(2, 3, heads, size, dtype=dtype), torch.empty(2, 5, 2, size, dtype=dtype)
        call = OPERATOR.describe(q, k, k.new_empty(2, 5, 2, size_v))
        assert call.traits == {"H": heads, "Hkv": 2, "D": max(size, size_v)}
        call = replace(call, device=torch.device("cuda", 0), arch="sm90")
        reasons = {backend.name: backend.why_not(call) for backend in OPERATOR.backends}
        for name in ("triton", "cuda-sm90"):
            assert dtype == torch.float32 or max(size, size_v) <= 256 or "up to 256, and D is" in reasons[name]
        return [name for name, reason in reasons.items() if reason is None]

    for sizes in ((8, 128), (128, 8), (8, 256), (192, 128)):
        assert takers(128, *sizes) == ["cuda-sm90", "triton", "native"]
        assert takers(130, *sizes) == takers(128, *sizes, torch.float32) == ["triton", "native"]
    for sizes in ((8, 264), (264, 8)):
        assert takers(4, *sizes) == ["native"]
    assert OPERATOR.describe(torch.empty(3, 4, 8)).traits == {"H": 4, "Hkv": 4, "D": 8}


def test_the_note_is_of_the_products_of_a_block(monkeypatch):
    monkeypatch.setattr("rl_kernels.core.batched.note", lambda *sizes: sizes)
    note, q = OPERATOR.backend("native").note, torch.empty(2, 3, 4, 24)
    assert note(OPERATOR.describe(q)) == (64, 32, 64)
    assert note(OPERATOR.describe(q[..., :16])) == (64, 16, 64)
    call = OPERATOR.describe(q)
    assert not any(map(note, (replace(call, device=torch.device("cuda", 0)), replace(call, dtype=torch.float64))))
    assert note(replace(call, traits={})) is None


@pytest.mark.smoke
def test_one_gradient_alone_is_that_of_all():
    given = dict(zip("qkv", operands(), strict=True), sinks=torch.linspace(-1, 1, 4))
    upstream = torch.randn_like(given["q"])

    def gradients(*names):
        leaves = {key: value.clone().requires_grad_(key in names) for key, value in given.items()}
        found = torch.autograd.grad(det_attention(**leaves, causal=True), [leaves[key] for key in names], upstream)
        return dict(zip(names, found, strict=True))

    whole = gradients(*given)
    assert all(torch.equal(gradients(name)[name], whole[name]) for name in given)


@pytest.mark.parametrize(("left", "softcap"), [(UNLIMITED, 0.0), (70, 5.0)])
def test_native_looks_at_no_value_where_that_would_wait(left, softcap):
    """A meta tensor has no values; nor may a mask be kept that a CUDA graph's memory holds."""
    q, k, v = (x.to("meta") for x in operands(2, 90, 200))
    sinks = torch.empty(4, device="meta")
    given = Inputs(q, k, v, sinks, *[None] * 6, 90, 200, 0.3, left, 0, softcap)
    batches._cached_mask_bits.cache_clear()
    out, lse = native.forward(*given)
    assert (out.shape, lse.shape) == (q.shape, (2, 4, 90))
    found = native.backward(*given, out, lse, torch.empty_like(out), True, True)
    assert [x.shape for x in found] == [x.shape for x in (q, k, v, sinks)]
    assert batches._cached_mask_bits.cache_info().currsize == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_contiguous_and_lse_has_no_gradient(dtype):
    for batch, queries, heads in ((2, 7, 2), (1, 7, 2), (1, 130, 1), (3, 1, 4)):
        q, k, v = (x.to(dtype) for x in operands(batch, queries, 150, heads, heads, 16))
        found = det_attention(q.requires_grad_(), k, v, causal=True, return_lse=True)
        assert isinstance(found, Attended)
        out, lse = found
        assert (out.stride(), lse.stride()) == tuple(torch.empty(x.shape).stride() for x in (out, lse))
        assert (out.requires_grad, lse.requires_grad, lse.dtype) == (True, False, torch.float32)


def test_a_compiled_packed_call_needs_no_longest_length():
    torch.compiler.reset()
    q, k, v = (x.flatten(0, 1) for x in operands(2, 20, 20))
    call = torch.compile(det_attention, fullgraph=True, backend="aot_eager")
    for bounds in ([0, 13, 40], [0, 40], [0, 1, 1, 39, 40]):
        cu_seqlens = torch.tensor(bounds)
        given = {"causal": True, "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        assert torch.equal(call(q, k, v, **given), det_attention(q, k, v, **given))


def test_unchecked_integers_are_kept_within_their_tensors():
    q, k, v = (x.flatten(0, 1) for x in operands(2, 20, 20))
    wild = torch.tensor([-5, 7, 3, 1 << 40])
    found = det_attention(q, k, v, causal=True, cu_seqlens_q=wild, cu_seqlens_k=wild, validate=False)
    assert torch.isfinite(found).all()
    pages = torch.randn(3, 16, 2, 8)
    table, used = torch.tensor([[0, 9], [1, 2]]), torch.tensor([32, 1 << 40])
    found = det_attention(
        *operands(2, 2)[:1], pages, pages, causal=True, block_table=table, seqused_k=used, validate=False
    )
    assert torch.isnan(found[0]).all()
    assert torch.isfinite(found[1]).all()


@pytest.fixture(params=["native", "triton", "cuda-sm90"])
def backend(request):
    """Return the name of each backend that runs here with BF16."""
    if request.param == "triton" and device().type == "cpu":
        pytest.skip("Triton's interpreter is for FP32")
    reason = OPERATOR.backend(request.param).why_not(OPERATOR.describe(operands(1, 1)[0].to(device(), torch.bfloat16)))
    return request.param if reason is None else pytest.skip(reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sinks_of_any_dtype(backend, dtype):
    q, k, v = (x.to(device(), torch.bfloat16) for x in operands(2, 20, 20))
    sinks = torch.linspace(-1, 1, q.shape[-2], device=device()).to(dtype)
    found, lse = det_attention(q, k, v, causal=True, sinks=sinks, return_lse=True, backend=backend)
    wanted = det_attention(q.cpu(), k.cpu(), v.cpu(), causal=True, sinks=sinks.cpu(), return_lse=True, backend="native")
    for one, other in zip((found, lse), wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("queries", "keys", "where"),
    [
        (1, 2048, {"k_start": torch.tensor([-128]), "seqused_k": torch.tensor([0])}),
        (256, 10, {"k_start": torch.tensor([-900])}),
    ],
    ids=["idle", "few-kept"],
)
def test_queries_that_see_no_key_that_is_kept(backend, queries, keys, where):
    q, k, v = (
        torch.randn(1, n, heads, 64).to(device(), torch.bfloat16) for n, heads in ((queries, 4), (keys, 2), (keys, 2))
    )
    given = {"causal": True, "window": (255, 0), "return_lse": True}
    on_device = {name: value.to(device()) for name, value in where.items()}
    found, lse = det_attention(q, k, v, **on_device, **given, backend=backend)
    out, wanted = det_attention(q.cpu(), k.cpu(), v.cpu(), **where, **given, backend="native")
    unseen = wanted == -torch.inf
    assert unseen[..., 0].all()
    assert torch.equal(lse.cpu() == -torch.inf, unseen)
    torch.testing.assert_close(found.cpu(), out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.cpu(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [2, 1030], ids=["one-segment", "two-segments"])
def test_more_sequences_than_a_dim_of_a_grid_has(backend, keys):
    if backend == "native":
        pytest.skip("it takes one sequence after the other")
    batch, edge = (1 << 16) + 3, 5
    q, k, v = (torch.randn(batch, n, 1, 8, device="cuda").bfloat16() for n in (1, keys, keys))

    def both(which):
        leaves = [x[which].detach().requires_grad_() for x in (q, k, v)]
        out = det_attention(*leaves, causal=True, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    whole = both(slice(None))
    for some in (slice(edge), slice(batch - edge, batch)):
        assert all(torch.equal(one[some], other) for one, other in zip(whole, both(some), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["native", "triton", "cuda-sm90"])
def test_a_page_that_does_not_exist_gives_nan_to_those_who_see_it(name, dtype):
    where = device()
    if name == "triton" and where.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter is for FP32")
    q = operands(2, 4)[0].to(where, dtype)
    if (reason := OPERATOR.backend(name).why_not(OPERATOR.describe(q, q, q))) is not None:
        pytest.skip(reason)
    for size, page in product((16, 64), (-1, -(1 << 31), 3, 1 << 30)):
        pages = torch.randn(3, size, 2, 8, device=where, dtype=dtype)
        table, used = torch.tensor([[2, page], [0, 1]], device=where), torch.tensor([size + 2, 2 * size], device=where)
        found = det_attention(
            q, pages, pages, causal=True, block_table=table, seqused_k=used, validate=False, backend=name
        )
        # The last two of the first sequence stand on the missing page.
        assert torch.isnan(found[0, 2:]).all(), (size, page)
        assert torch.isfinite(found[1]).all(), (size, page)


@pytest.mark.parametrize("what", ["k", "v"])
def test_a_key_that_is_not_finite_spares_rows_of_other_blocks_and_sequences(what):
    """Native computes up to 256 rows of several sequences at once; NaN may spread within 64 rows and 64 keys only."""
    given = dict(zip("qkv", operands(2, 280, 300, 6, 2), strict=True))
    given = {name: x.requires_grad_() for name, x in given.items()}
    clean, upstream = det_attention(**given, causal=True), torch.randn(2, 280, 6, 8)
    dq = torch.autograd.grad(clean, given["q"], upstream)[0]
    with torch.no_grad():
        given[what][1, 100] = torch.nan
    spoiled = det_attention(**given, causal=True)
    for found, wanted in ((spoiled, clean), (torch.autograd.grad(spoiled, given["q"], upstream)[0], dq)):
        assert torch.equal(found[0], wanted[0])
        # 128 rows, of 3 heads each, whose last key lies in the first block.
        assert torch.equal(found[1, :42], wanted[1, :42])
        # These see the key.
        assert found[1, 80:].isnan().all()


def test_decoding_has_the_bits_of_the_prompt_whatever_code_the_library_runs():
    code = """if True:
        import torch
        from rl_kernels.attention import det_attention
        q, k, v = (torch.randn(2, 150, heads, 40) for heads in (6, 2, 2))
        for threads in (1, 2):
            torch.set_num_threads(threads)
            whole = det_attention(q, k, v, causal=True)
            for t in (0, 63, 64, 149):
                one = det_attention(q[1:, t : t + 1], k[1:, : t + 1], v[1:, : t + 1], causal=True)
                assert torch.equal(one[0, 0], whole[1, t]), t
    """
    threads = torch.get_num_threads()
    exec(code, {})
    torch.set_num_threads(threads)
    settings = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **settings}, timeout=300)


def test_what_varies_is_looked_at_in_every_call():
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16)
    used = torch.tensor([9, 4])
    for _ in range(2):
        det_attention(q, k, k, causal=True, seqused_k=used)
    with pytest.raises(ValueError, match=r"^max_seqlen_q: expected None without the cu_seqlens"):
        det_attention(q, k, k, causal=True, seqused_k=used, max_seqlen_q=5)
    used[1] = 10
    with pytest.raises(ValueError, match=r"^seqused_k: "):
        det_attention(q, k, k, causal=True, seqused_k=used)
    for window, seen in (((1, 0), 2), ((2, 0), 3)):
        out = det_attention(torch.zeros_like(q), k, k, causal=True, window=window)
        torch.testing.assert_close(out[:, -1, 0], k[:, -seen:, 0].mean(1))
    with pytest.raises(TypeError, match=r"^window: "):
        det_attention(q, k, k, causal=True, window=(True, 0))
    with pytest.raises(ValueError, match=r"^window: expected an integer <= "):
        det_attention(q, k, k, causal=True, window=(1 << 31, 0))
    leaf = k.clone().requires_grad_()
    det_attention(q, k, k, causal=True, seqused_k=used, validate=False)
    with pytest.raises(ValueError, match=r"^v: expected a tensor that does not require grad"):
        det_attention(q, k, leaf, causal=True, seqused_k=used, validate=False)


def test_the_longest_sequence_is_read_from_offsets():
    cu_seqlens = torch.tensor([0, 13, 40, 41])
    assert checks.longest(None, cu_seqlens) == 27
    assert checks.longest(5, cu_seqlens) == 5
    for unread in (None, cu_seqlens[:1], cu_seqlens.float(), cu_seqlens[None], cu_seqlens.to("meta"), [0, 41]):
        assert checks.longest(None, unread) is None


def test_kernels_are_told_the_longest_sequence():
    q, k, v = operands(2, 20, 20)
    packed = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 13, 40]))
    for given, options, longest in (((q, k, v), {}, 20), ([x.flatten(0, 1) for x in (q, k, v)], packed, 27)):
        with RawCalls() as raw:
            det_attention(*given, **options)
        (inputs,) = [args for name, (_, args) in raw.calls.items() if "det_attention_output" in name]
        assert inputs[10:12] == (longest, longest)
    nothing = dict.fromkeys(packed, torch.tensor([0]))
    out = det_attention(q[0, :0], k[0, :0], v[0, :0], **nothing, max_seqlen_q=0, max_seqlen_k=0)
    assert out.shape == (0, 4, 8)


def test_a_sequence_may_start_at_its_end_and_many_wrong_numbers_are_not_all_shown():
    q, k, v = operands()
    out = det_attention(q, k, v, k_start=torch.tensor([3, 0]), seqused_k=torch.tensor([3, 20]))
    assert not out[0].any()
    packed = {"cu_seqlens_q": torch.arange(7), "cu_seqlens_k": torch.tensor([0, 9, 8, *range(10, 40, 3), 40])[:7]}
    with pytest.raises(ValueError, match=r"got \[0, 9, 8, 10, 13, 16, 19\]"):
        det_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **packed)
    packed = {"cu_seqlens_q": torch.tensor([0, *range(9), 6]), "cu_seqlens_k": torch.arange(11)}
    with pytest.raises(ValueError, match=r"got \[0, 0, 1, 2, 3, 4, 5\] and more, the last 6"):
        det_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **packed)


def test_bounds_of_packed_sequences_are_read_in_every_call():
    q, k, v = (x.flatten(0, 1) for x in operands(2, 20, 20))
    for bounds in ([0, 13, 40], [0, 39, 40]):
        cu_seqlens = torch.tensor(bounds)
        given = {"causal": True, "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        found = det_attention(q, k, v, **given)
        assert torch.equal(found, det_attention(q, k, v, **given, max_seqlen_q=39, max_seqlen_k=39))
    with pytest.raises(ValueError, match=r"^max_seqlen_q: expected at least 39"):
        det_attention(q, k, v, **given, max_seqlen_q=38)
    cu_seqlens[1] = 41
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: "):
        det_attention(q, k, v, **given)
    for wrong in (cu_seqlens.float(), cu_seqlens[None], [0, 39, 40]):
        with pytest.raises((TypeError, ValueError), match=r"^cu_seqlens_q: "):
            det_attention(q, k, v, cu_seqlens_q=wrong, cu_seqlens_k=cu_seqlens)
