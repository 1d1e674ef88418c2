"""A model under invariant() as trainers and engines run it: static caches, and adapters."""

import pytest
import torch

from rl_kernels.models import invariant


def drawn(model, batch, **options):
    """Return the tokens that a batch goes on with, and their logits."""
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    given |= {"output_logits": True, "return_dict_in_generate": True}
    found = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **given)
    return found.sequences[:, -6:], torch.stack(found.logits, 1)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "window"),
    [
        *(("Llama", {}), ("Mistral", {"sliding_window": 5}), ("Qwen3Moe", {}), ("DeepseekV3", {})),
        *(("GptOss", {"sliding_window": window}) for window in (5, 64)),
    ],
)
def test_tokens_do_not_follow_the_kind_of_cache(tiny, prompts, padded, name, window):
    """And logits are those of the whole sequence in training."""
    model = tiny(name, **window)
    with invariant(model):
        found = [drawn(model, padded(prompts)[0], cache_implementation=kind) for kind in ("static", "dynamic")]
        for row, prompt in enumerate(prompts):
            (alone,), (of_alone,) = drawn(model, padded([prompt])[0])
            for tokens, logits in found:
                assert torch.equal(tokens[row], alone)
                assert torch.equal(logits[row], of_alone)
            whole = torch.cat((prompt, alone))[None]
            scored = model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
            assert torch.equal(scored, of_alone)


@pytest.mark.smoke
def test_gradients_of_adapters_do_not_follow_the_padding(tiny, prompts):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapter = peft.get_peft_model(tiny(), config).train()
    rows = [prompt[:16] for prompt in prompts if len(prompt) >= 16]
    upstream = torch.randn(len(rows), 16, 211, generator=torch.Generator().manual_seed(2))
    trained = [value for value in adapter.parameters() if value.requires_grad]

    def gradients(more):
        ids = torch.zeros(len(rows), 16 * (1 + more), dtype=torch.long)
        ids[:, :16] = torch.stack(rows)
        mask = (torch.arange(ids.shape[1]) < 16).long().expand_as(ids)
        logits = adapter(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return torch.autograd.grad(logits[:, :16], trained, upstream)

    with invariant(adapter):
        assert all(map(torch.equal, gradients(0), gradients(2)))
