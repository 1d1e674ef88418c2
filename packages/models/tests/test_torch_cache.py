"""PyTorch's flash attention with a cache: keys in use, pages, and results written to a tensor; and what is refused."""

import pytest
import torch
from torch.nn.attention import varlen

from rl_kernels.attention import det_attention
from rl_kernels.models.clients.torch import Registered

aten = torch.ops.aten
HAS_PAGES = "block_table" in str(aten._flash_attention_forward.default._schema)
paged = pytest.mark.skipif(not HAS_PAGES, reason="this version of PyTorch has no pages")
BOUNDS = torch.tensor([0, 1, 1, 4, 9], dtype=torch.int32)
"""Queries of four sequences: one, none, three and five."""
USED = torch.tensor([20, 7, 3, 66], dtype=torch.int32)
"""Their keys in use."""


@pytest.fixture(autouse=True)
def on_cpu():
    handle = Registered("CPU")
    yield
    handle.remove()


def drawn(*shapes, seed=4):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source) for shape in shapes]


def cache(size=16):
    """Return queries, pages of keys and values with NaN where nobody may look, the table, and packed keys in use."""
    count = -(-66 // size)
    q, k, v = drawn((9, 4, 16), (4 * count + 1, size, 2, 16), (4 * count + 1, size, 2, 16))
    table = torch.randperm(4 * count, generator=torch.Generator().manual_seed(1)).view(4, count).int() + 1
    room = torch.arange(count * size) < USED[:, None]
    for pages in (k, v):
        rows = pages[table].flatten(1, 2)
        rows[~room] = torch.nan
        pages[table] = rows.unflatten(1, (count, size))
        pages[0] = torch.nan
    keys, values = (pages[table].flatten(1, 2)[room] for pages in (k, v))
    return q, k, v, table, keys, values


def in_use():
    return torch.cat((torch.zeros(1), USED.cumsum(0))).int()


@paged
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0)])
def test_pages(size, window):
    """FlashAttention-2 wants the room of each sequence beside its pages, the later ones None: it changes nothing."""
    q, k, v, table, keys, values = cache(size)
    given = {"seqused_k": USED, "block_table": table, "window_size": window, "enable_gqa": True}
    aux = varlen.AuxRequest(lse=True)
    where = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": in_use(), "causal": False, "window": window}
    wanted = det_attention(q, keys, values, **where, return_lse=True)
    for room in (torch.arange(5, dtype=torch.int32) * table.shape[1] * size, None):
        call = (q, k, v, BOUNDS, room, 5, table.shape[1] * size)
        out, lse = varlen.varlen_attn(*call, return_aux=aux, **given)
        assert torch.equal(out, wanted.out)
        assert torch.equal(lse, wanted.lse)
        into = torch.full_like(q, torch.nan)
        assert varlen.varlen_attn_out(into, *call, **given) is into
        assert torch.equal(into, out)
        sides = {"window_size_left": window[0], "window_size_right": window[1], "seqused_k": USED, "block_table": table}
        for splits in (None, 1, 3):
            found = aten._flash_attention_forward(*call, 0.0, False, False, **sides, num_splits=splits)
            assert torch.equal(found[0], out)


@pytest.mark.parametrize("room", [[20, 7, 3, 66], [30, 16, 32, 80], [21, 40, 3, 67]])
def test_keys_in_use_of_packed_keys(room):
    *_, keys, values = cache()
    (q,) = drawn((9, 4, 16))
    bounds = torch.tensor([0, *room]).cumsum(0).int()
    k, v = torch.full((2, sum(room), 2, 16), torch.nan)
    for part, (start, used) in enumerate(zip(bounds.tolist(), USED.tolist(), strict=False)):
        own = slice(in_use()[part], in_use()[part + 1])
        k[start : start + used], v[start : start + used] = keys[own], values[own]
    where = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": in_use()}
    for causal in (False, True):
        call = (q, k, v, BOUNDS, bounds, 5, max(room), 0.0, causal, False)
        found = aten._flash_attention_forward(*call, seqused_k=USED)
        wanted = det_attention(q, keys, values, **where, causal=causal, return_lse=True)
        assert torch.equal(found[0], wanted.out)
        assert torch.equal(found[1], wanted.lse)


def test_keys_in_use_where_there_is_no_sequence_or_no_key():
    for total in (0, 5):
        q, k = torch.zeros(total, 4, 16), torch.zeros(0, 2, 16)
        bounds = torch.tensor([0, 5][: 1 + bool(total)]).int()
        used, ends = torch.zeros(len(bounds) - 1, dtype=torch.int32), torch.zeros_like(bounds)
        out, *_ = aten._flash_attention_forward(q, k, k, bounds, ends, total, 0, 0.0, True, False, seqused_k=used)
        assert torch.equal(out, q)


def test_keys_in_use_of_a_dense_cache():
    q, k, v = drawn((4, 3, 4, 16), (4, 70, 2, 16), (4, 70, 2, 16))
    found = aten._flash_attention_forward(q, k, v, None, None, 3, 70, 0.0, True, False, seqused_k=USED)
    assert torch.equal(found[0], det_attention(q, k, v, causal=True, seqused_k=USED))


ARGUMENTS = [argument.name for argument in aten._flash_attention_forward.default._schema.arguments][:10]


def call(changes, **options):
    """Call the forward op of packed sequences, of which some arguments are others."""
    (x,) = drawn((9, 4, 16))
    usual = dict(zip(ARGUMENTS, [x, x, x, BOUNDS, BOUNDS, 5, 5, 0.0, True, False], strict=True))
    return aten._flash_attention_forward(*(usual | changes).values(), **options)


REFUSED = [
    ("dropout_p", {"dropout_p": 0.1}, {}),
    ("return_debug_mask", {"return_debug_mask": True}, {}),
    ("alibi_slopes", {}, {"alibi_slopes": torch.ones(4)}),
    ("window_size_left", {}, {"window_size_left": -2}),
    ("window_size_right", {}, {"window_size_right": -7}),
    ("scale", {}, {"scale": 0.0}),
    ("value", {"value": torch.zeros(9, 4, 8)}, {}),
    ("cum_seq_k", {"cum_seq_k": None}, {}),
    ("cum_seq_k", {"cum_seq_q": None, "query": torch.zeros(2, 3, 4, 16)}, {}),
    ("q", {"query": torch.zeros(9, 4, 16, dtype=torch.float64)}, {}),
    ("q", {name: torch.zeros(9, 4, 12) for name in ("query", "key", "value")}, {}),
    ("k", {"key": torch.zeros(9, 3, 16), "value": torch.zeros(9, 3, 16)}, {}),
    ("cu_seqlens_q", {"cum_seq_q": BOUNDS.float()}, {}),
]


@pytest.mark.smoke
def test_what_is_refused_is_named():
    for name, changes, options in REFUSED:
        with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
            call(changes, **options)


@paged
def test_pages_without_keys_in_use_are_refused():
    pages, table = torch.zeros(2, 16, 4, 16), torch.zeros(4, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^seqused_k: expected the number"):
        call({"key": pages, "value": pages}, block_table=table)
    with pytest.raises(ValueError, match="multiple of 16"):
        call({"key": pages[:, :8], "value": pages[:, :8]}, block_table=table, seqused_k=USED)


def test_the_gradient_of_a_cache_is_refused():
    """Autograd gives its backward op neither seqused_k nor pages: it would be that of all keys."""
    used = torch.tensor([1, 0, 2, 5], dtype=torch.int32)
    for name in ("query", "key", "value"):
        (leaf,) = drawn((9, 4, 16), seed=5)
        with pytest.raises(ValueError, match=r"^seqused_k: expected no gradient"):
            call({name: leaf.requires_grad_()}, seqused_k=used)
        with torch.no_grad():
            call({name: leaf}, seqused_k=used)


def test_sdpa_refuses_dropout():
    x, lse, state = torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3), torch.zeros(2, dtype=torch.uint64)
    with pytest.raises(ValueError, match=r"^dropout_p: expected 0, got 0.5"):
        aten._scaled_dot_product_flash_attention(x, x, x, 0.5)
    saved = (x, x, x, x, x, lse, lse, lse, 3, 3, 0.5, True, state, state)
    with pytest.raises(ValueError, match=r"^dropout_p: expected 0, got 0.5"):
        aten._scaled_dot_product_flash_attention_backward(*saved)


@pytest.mark.skipif(not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"), reason="PyTorch has no such op")
def test_a_tensor_to_write_to_must_fit():
    """A copy would be spread over the heads, or rounded, without a word."""
    (x,) = drawn((9, 4, 16))
    for out in (torch.zeros(9, 1, 16), torch.zeros(9, 4, 16, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"^out: expected torch.float32"):
            aten._flash_attention_forward_no_dropout_inplace(out, x, x, x, BOUNDS, BOUNDS, 5, 5, 0.0, True, False)
