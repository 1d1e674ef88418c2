"""Continuous batching of models under invariant(): tokens, logits and log-probabilities are those of a plain pass."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.attention import det_attention
from rl_kernels.models import invariant, paged, pretrained
from rl_kernels.models.attention import attention_forward

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "ContinuousBatchingConfig"):
    pytest.skip("this transformers has no such continuous batching", allow_module_level=True)

PAGE, NEW = 16, 9
BATCH = 24
"""Tokens of a batch: fewer than the prompts have, so that these come in chunks beside the tokens of others."""
GEMMA = {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 16}
MODELS = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "GPTNeoX": {"num_key_value_heads": 4},
    "Mistral": {"sliding_window": 6},
    "Gemma2": GEMMA,
    "Gemma3Text": {"head_dim": 8, "sliding_window": 12},
    "Qwen3Moe": {},
    "GptOss": {},
}
"""Grouped heads, sliding windows in every layer or in some, caps of the scores and of the logits, sinks, experts."""


def batched(model, prompts, **settings):
    """Return what continuous batching gives for each prompt, all logits that it was made of, and the batches' sizes."""
    names = {field.name for field in fields(transformers.ContinuousBatchingConfig)}
    page = {"page_size" if "page_size" in names else "block_size": PAGE}
    options = {"num_blocks": 24, "max_batch_tokens": BATCH, "return_logprobs": True, "use_cuda_graph": False}
    rows, sizes = [], []

    def keep(module, args, kwargs, output):
        rows.append(output.logits[0].clone())
        sizes.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_hook(keep, with_kwargs=True)
    found = model.generate_batch(
        [prompt.tolist() for prompt in prompts],
        generation_config=transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**{**page, **options, **settings}),
    )
    hook.remove()
    assert len(found) == len(prompts)
    for result in found.values():
        assert result.error is None, result.error
        assert len(result.generated_tokens) == NEW
    return list(found.values()), torch.cat(rows), sizes


@torch.no_grad()
def alone(model, prompt, tokens):
    """Return the logits of the tokens of one prompt, of a plain forward pass."""
    ids = torch.cat((prompt, torch.tensor(tokens)))[None].to(model.device)
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


def logps_of(logits, tokens):
    """Return log-probabilities as continuous batching forms them."""
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    return logits.float().softmax(-1).gather(1, chosen)[:, 0].log().tolist()


def differing(model, prompts, results, rows):
    """Count rows of logits, and log-probabilities, that are not those of a plain pass."""
    counts = [0, 0]
    for prompt, result in zip(prompts, results, strict=True):
        expected = alone(model, prompt, result.generated_tokens)
        counts[0] += int((rows[:, None] != expected).any(2).all(0).sum())
        own = logps_of(expected, result.generated_tokens)
        counts[1] += sum(x != y for x, y in zip(result.logprobs, own, strict=True))
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_bits_are_those_alone(tiny, prompts, name, device):
    halves = [torch.bfloat16] if name in ("Llama", "Gemma2") or device.type == "cuda" else []
    for dtype in (torch.float32, *halves):
        model = tiny(name, dtype, device, **MODELS[name])
        with invariant(model, strict=True):
            results, rows, sizes = batched(model, prompts)
            assert max(sizes) <= BATCH < sum(map(len, prompts))
            assert differing(model, prompts, results, rows) == [0, 0]
            for prompt, result in zip(prompts, results, strict=True):
                ids, options = prompt[None].to(device), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
                plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **options)
                assert plain[0, len(prompt) :].tolist() == result.generated_tokens
        assert model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Qwen3Moe", "GptOss"])
def test_in_cuda_graphs(tiny, prompts, name):
    """Which pad the batches; a hook sees nothing of a graph, so it is the log-probabilities that tell."""
    model = tiny(name, torch.bfloat16, "cuda", **MODELS[name])
    with invariant(model, strict=True):
        # Asynchronous batches, the default here, do not wait until transformers has reset their inputs: where the GPU
        # has other work, the first one reads zeros, the stock model's too.
        results, _, _ = batched(model, prompts, use_cuda_graph=True, use_async_batching=False)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.logprobs == logps_of(alone(model, prompt, result.generated_tokens), result.generated_tokens)


def test_a_prefix_that_prompts_share(tiny):
    """Its keys are written by one request and read by all."""
    generator = torch.Generator().manual_seed(3)
    prefix = torch.randint(3, 211, (3 * PAGE,), generator=generator)
    prompts = [torch.cat((prefix, torch.randint(3, 211, (n,), generator=generator))) for n in (5, 1, 9, 2)]
    model = tiny()
    with invariant(model):
        results, rows, sizes = batched(model, prompts)
        assert differing(model, prompts, results, rows) == [0, 0]
    assert sum(sizes) < sum(len(prompt) + NEW - 1 for prompt in prompts)


def test_no_flash_attention_takes_the_place_of_ours(tiny, monkeypatch):
    """Continuous batching prefers it wherever it is installed."""
    api = pytest.importorskip("transformers.generation.continuous_batching.continuous_api")
    for version in (2, 3):
        monkeypatch.setattr(api, f"is_flash_attn_{version}_available", lambda **_: True)
    model = tiny()
    with invariant(model):
        model.init_continuous_batching(generation_config=transformers.GenerationConfig(eos_token_id=-1))
        assert model.config._attn_implementation == pretrained.name()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("gone", [0, 5, 64, 1000, 1024, 1087, 2500])
def test_dropped_keys_are_counted(gone):
    """A query's bits follow from the places of its keys in their sequence, beside others that drop other numbers."""
    window, generator = 40, torch.Generator().manual_seed(gone)
    for count in (1, 70):
        lengths = [gone + window - 1 + count, count, 7 + count]
        dropped = [gone, 0, 7 + count - min(7 + count, window - 1 + count)]
        whole, packed = [], []
        for length, lost in zip(lengths, dropped, strict=True):
            q, k, v = (torch.randn(1, length, heads, 8, generator=generator) for heads in (4, 2, 2))
            whole.append(det_attention(q, k, v, causal=True, window=(window - 1, 0))[0, -count:])
            packed.append((q[0, -count:], k[0, lost:], v[0, lost:]))
        q, k, v = (torch.cat(parts) for parts in zip(*packed, strict=True))
        # One more, without a token: batches of a fixed size are filled up with such.
        ends = torch.tensor([0, *(len(part[1]) for part in packed), 0]).cumsum(0)
        source, table, used = paged.page_layout(ends, torch.tensor([*dropped, 3]), len(k), int(ends.diff().max()))
        k, v = (x[source].unflatten(0, (-1, paged.PAGE)) for x in (k, v))
        queries = torch.tensor([0, count, count, count, 0]).cumsum(0)
        found = det_attention(
            q, k, v, causal=True, window=(window - 1, 0), cu_seqlens_q=queries, block_table=table, seqused_k=used
        )
        assert torch.equal(found, torch.cat(whole)), count


class Cache:
    """One that keeps nothing, and is called as in transformers 5.17."""

    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        return key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)


def test_what_it_cannot_do_is_said():
    layer = SimpleNamespace(layer_idx=0, is_causal=True)
    q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_seqlen_q": 3, "max_seqlen_k": 3, "cache": Cache()}
    given |= {"read_index": [], "write_index": []}
    assert attention_forward(layer, q, k, k, None, **given)[0].shape == (1, 3, 4, 8)
    with pytest.raises(ValueError, match="block_table: the attention of invariant"):
        attention_forward(layer, q, k, k, None, **given, block_table=torch.zeros(1, 1, 1).int())
    with pytest.raises(ValueError, match="position_ids: expected the positions of the tokens"):
        attention_forward(layer, q, k, k, None, **given, sliding_window=2)
