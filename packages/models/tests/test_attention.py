"""The attention of invariant() behind transformers' interfaces: each mask means what transformers' own means."""

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.models import attention, invariant, pretrained
from rl_kernels.models.attention import attention_forward, attention_mask

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")
HEADS, KV_HEADS, SIZE = 4, 2, 8


class Layer(torch.nn.Module):
    is_causal = True


def config(implementation, **options):
    pretrained.register()
    made = transformers.MistralConfig(hidden_size=32, num_attention_heads=HEADS, num_hidden_layers=1, **options)
    made._attn_implementation = implementation
    return made


def filled(kind, batch, count):
    """Return a cache that holds some keys, as many as it keeps; None for no cache."""
    if kind is None:
        return None
    made = config("sdpa", sliding_window=12 if "window" in kind else None)
    static = "static" in kind
    cache = transformers.StaticCache(made, max_cache_len=60) if static else transformers.DynamicCache(config=made)
    if count:
        cache.update(*(torch.zeros(batch, KV_HEADS, count, SIZE) for _ in range(2)), 0)
    return cache


def masks(create, window, batch, queries, mask, cache, positions):
    """Return our mask, and transformers' as bools ``[B, 1, T, S]``."""
    found = []
    for implementation in (pretrained.name(), "eager"):
        given = config(implementation, sliding_window=window)
        found.append(create(given, torch.zeros(batch, queries, 32), mask, cache, position_ids=positions))
    ours, theirs = found
    return ours, None if theirs is None else theirs == 0


def expected(q, k, v, visible, causal, sinks=None):
    """Return attention in FP64, ``[B, T, H, D]``."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1).double() for x in (k, v))
    scores = q.double() @ k.mT * q.shape[-1] ** -0.5
    if visible is None:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
        visible = visible.tril(k.shape[2] - q.shape[2]) if causal else visible
    scores = scores.masked_fill(~visible, -torch.inf)
    extra = torch.full_like(scores[..., :1], -torch.inf)
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand_as(extra)
    weights = torch.cat((scores, extra), -1).softmax(-1)[..., :-1].nan_to_num()
    return (weights @ v).transpose(1, 2)


PLAIN, SLIDING = "create_causal_mask", "create_sliding_window_causal_mask"
BOTH_WAYS = "create_bidirectional_mask"
PADDED = torch.tensor([[0] * 5 + [1] * 15, [1] * 20, [0] * 19 + [1]])
RIGHT = torch.tensor([[1] * 20, [1] * 13 + [0] * 7, [1] + [0] * 19])
RESTARTED = torch.tensor([[*range(7), *range(13)], [*range(1), *range(19)], [*range(20)]])
CALLS = {
    "prompt": (PLAIN, None, 20, 0, None, None),
    "padded": (PLAIN, None, 20, 0, PADDED, None),
    "padded behind": (PLAIN, None, 20, 0, RIGHT, None),
    "window": (SLIDING, 12, 20, 0, None, None),
    "window, padded": (SLIDING, 12, 20, 0, PADDED, None),
    "packed": (PLAIN, None, 20, 0, None, RESTARTED),
    "packed, window": (SLIDING, 3, 20, 0, None, RESTARTED),
    "window of one": (SLIDING, 1, 20, 0, None, None),
    "chunk": (PLAIN, None, 6, 14, PADDED, "dynamic"),
    "token": (PLAIN, None, 1, 19, PADDED, "dynamic"),
    "chunk, window": (SLIDING, 12, 6, 14, PADDED, "dynamic window"),
    "token, window": (SLIDING, 12, 1, 19, None, "dynamic window"),
    "prompt, static": (PLAIN, None, 20, 0, PADDED, "static"),
    "token, static": (PLAIN, None, 1, 19, PADDED, "static"),
    "token, static window": (SLIDING, 12, 1, 19, PADDED, "static window"),
    "prompt, static window": (SLIDING, 12, 20, 0, PADDED, "static window"),
    "first token, static window": (SLIDING, 12, 1, 3, None, "static window"),
    **{f"both ways {i}": (BOTH_WAYS, None, 20, 0, mask, None) for i, mask in enumerate((None, PADDED, RIGHT))},
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CALLS)
def test_masks_mean_what_those_of_transformers_mean(name):
    create, window, queries, before, mask, positions = CALLS[name]
    kind, positions = (positions, None) if isinstance(positions, str) else (None, positions)
    layer, cache = Layer(), filled(kind, 3, before)
    layer.is_causal = create != BOTH_WAYS
    ours, visible = masks(getattr(masking, create), window, 3, queries, mask, cache, positions)
    draw, keys = Draw(torch.float32, seed=3), 20 if visible is None else visible.shape[-1]
    q, k, v = draw.normal(3, HEADS, queries, SIZE), *(draw.normal(3, KV_HEADS, keys, SIZE) for _ in range(2))
    found, _ = attention_forward(layer, q, k, v, ours, sliding_window=window)
    wanted = expected(q, k, v, visible, causal=layer.is_causal)
    real = torch.ones(3, queries, dtype=torch.bool) if mask is None else mask[:, before : before + queries].bool()
    torch.testing.assert_close(found[real].double(), wanted[real], rtol=1e-5, atol=1e-6)
    # An argument of the call goes before the layer's attribute.
    is_causal, layer.is_causal = layer.is_causal, not layer.is_causal
    again, _ = attention_forward(layer, q, k, v, ours, sliding_window=window, is_causal=is_causal)
    assert torch.equal(again, found)


@pytest.mark.smoke
def test_sinks_scale_and_sequences_of_a_collator():
    draw = Draw(torch.float32, seed=5)
    q, k, v = draw.normal(1, HEADS, 20, SIZE), *(draw.normal(1, KV_HEADS, 20, SIZE) for _ in range(2))
    sinks, bounds = draw.normal(HEADS), torch.tensor([0, 7, 20], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 13, "max_length_k": 13}
    found, _ = attention_forward(Layer(), q, k, v, None, s_aux=sinks, **lengths)
    for part in (slice(0, 7), slice(7, 20)):
        own = (q[:, :, part], k[:, :, part], v[:, :, part])
        assert torch.equal(found[:, part], attention_forward(Layer(), *own, None, s_aux=sinks)[0])
        wanted = expected(*own, None, causal=True, sinks=sinks)
        torch.testing.assert_close(found[:, part].double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.smoke
def test_patterns_and_padding_of_other_kinds_are_refused():
    def ours(**options):
        given = {"position_ids": None, "attention_mask": None, "past_key_values": None, **options}
        return masking.create_causal_mask(config(pretrained.name()), torch.zeros(1, 6, 32), **given)

    with pytest.raises(ValueError, match="this model adds a pattern of its own"):
        ours(or_mask_function=lambda b, h, q, k: k >= 0)
    with pytest.raises(ValueError, match="this model has another pattern"):
        ours(block_sequence_ids=torch.tensor([[-1, 0, 0, -1, -1, -1]]))
    with pytest.raises(ValueError, match="attention_mask: expected padding before or after a sequence"):
        ours(attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]]))
    for wrong in (7, 3):
        window = masking.sliding_window_causal_mask_function(5)
        with pytest.raises(ValueError, match="this model has another pattern"):
            attention_mask(1, 20, 20, mask_function=window, local_size=wrong)
    padded = torch.tensor([[0, 1, 1, 1, 1, 1]])
    chunks = masking.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="attention_mask: expected packed sequences without padding or a cache"):
        attention_mask(1, 6, 6, mask_function=chunks, attention_mask=padded.bool(), local_size=4)
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(1, 6\) for bidirectional attention"):
        attention_mask(1, 3, 6, attention_mask=padded.bool(), local_size=2, allow_is_bidirectional_skip=True)


def test_holes_that_cannot_be_looked_at_fail_later(monkeypatch):
    """With a cache that has dropped keys too, whose offset must not hide the mark."""
    monkeypatch.setattr(attention, "values_hidden", lambda value: True)
    hole = torch.tensor([[1, 1, 0, 1, 1, 1]]).bool()
    for given in ({"kv_offset": 2, "q_offset": 4, "q_length": 2, "kv_length": 4}, {"q_length": 6, "kv_length": 6}):
        mask = attention_mask(1, attention_mask=hole, **given)
        operands = torch.zeros(1, HEADS, given["q_length"], SIZE), *torch.zeros(2, 1, 2, given["kv_length"], SIZE)
        with pytest.raises(RuntimeError, match="attention_mask: expected a causal mask"):
            attention_forward(Layer(), *operands, mask, sliding_window=3)
    with pytest.raises(RuntimeError, match="attention_mask: expected a causal mask"):
        attention_mask(1, 6, 6, attention_mask=hole, allow_is_bidirectional_skip=True)


def test_packed_sequences_under_compile_are_no_silent_mistake(tiny, prompts):
    torch.compiler.reset()
    model, row = tiny(), torch.cat(prompts[:2])[None]
    lengths = [len(ids) for ids in prompts[:2]]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    named = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 19, "max_length_k": 19}
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    with invariant(model), torch.no_grad():
        for options in ({}, {"use_cache": False}):
            with pytest.raises(RuntimeError, match="position_ids: expected one sequence per row here, or cu_seq_len"):
                run(row, position_ids=places, **options)
        found = run(row, position_ids=places, use_cache=False, **named).logits
        assert torch.equal(found, model(row, position_ids=places, use_cache=False).logits)


@pytest.mark.parametrize(("name", "window"), [("Llama", {}), ("Mistral", {"sliding_window": 70})])
def test_tokens_of_a_cache_are_those_of_the_prompt_across_blocks(tiny, name, window):
    """A cache of a window drops keys, and what is left still counts from the first of the sequence."""
    model = tiny(name, num_hidden_layers=1, **window)
    ids = torch.randint(211, (2, 150), generator=torch.Generator().manual_seed(5))
    with invariant(model), torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for kind in (transformers.DynamicCache(config=model.config), transformers.StaticCache(model.config, 160)):
            model(ids[:, :140], past_key_values=kind)
            for at in range(140, 150):
                found = model(ids[:, at : at + 1], past_key_values=kind).logits
                assert torch.equal(found[:, 0], whole[:, at]), (type(kind), at)


def test_an_encoder(prompts, padded):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=211, **sizes)).eval()
    batch, places = padded(prompts, left=False)
    with invariant(model), torch.no_grad():
        found = model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        for place, prompt in zip(places, prompts, strict=True):
            assert torch.equal(found[place], model(prompt[None]).last_hidden_state[0])


@pytest.mark.parametrize("left", [False, True])
def test_a_padded_source_of_a_decoder(prompts, padded, left):
    """With a target as long as the source too, where its mask could be taken for that of the queries."""
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32, "vocab_size": 211}
    torch.manual_seed(0)
    # Positions count padding: without them padding on the left changes no token.
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes)).eval()
    torch.nn.init.zeros_(model.model.encoder.embed_positions.weight)
    batch, _ = padded(prompts, left=left)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        for length in (1, 9, ids.shape[1]):
            target = torch.randint(3, 211, (len(prompts), length), generator=torch.Generator().manual_seed(length))
            stock = model(ids, attention_mask=mask, decoder_input_ids=target).logits
            with invariant(model, strict=True):
                found = model(ids, attention_mask=mask, decoder_input_ids=target).logits
                for row, prompt in enumerate(prompts):
                    alone = model(prompt[None], decoder_input_ids=target[row : row + 1]).logits[0]
                    assert torch.equal(found[row], alone), (length, row)
            torch.testing.assert_close(found, stock, rtol=1e-4, atol=1e-4)


def test_positions_in_place_of_a_mask_are_refused():
    """As Pixtral gives them for two images where it takes an attention for flash attention."""
    x = torch.randn(1, 2, 8, 16)
    layer = torch.nn.Module()
    layer.is_causal = False
    places = torch.arange(8)[None]
    whole = attention_forward(layer, x, x, x, None, position_ids=places)[0]
    assert torch.equal(whole, attention_forward(layer, x, x, x, None)[0])
    for several in (places % 4, places * 2):
        with pytest.raises(ValueError, match=r"^position_ids: expected one sequence per row"):
            attention_forward(layer, x, x, x, None, position_ids=several)


def test_a_sampled_token_takes_few_launches_for_its_mask():
    padded = torch.tensor([[False, True, True, True, True]] * 3)
    with torch.profiler.profile() as profile:
        attention_mask(3, 1, 5, 4, attention_mask=padded)
    views = {"aten::view", "aten::unsqueeze", "aten::slice", "aten::select", "aten::detach", "aten::to"}
    ops = [event.name for event in profile.events() if event.cpu_parent is None and event.name not in views]
    assert len(ops) <= 7, ops
