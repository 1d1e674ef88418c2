"""A model under invariant() as trainers and engines run it: static caches, checkpoints, adapters, compiled graphs."""

import pytest
import torch

from rl_kernels.models import invariant

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def padded(prompts):
    """Return a batch that is padded on the left, as ``generate`` takes it."""
    width = max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def drawn(model, prompts, **options):
    """Return the tokens that a batch goes on with, and their logits."""
    batch = padded(prompts)
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    given |= {"output_logits": True, "return_dict_in_generate": True}
    found = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **given)
    return found.sequences[:, -6:], torch.stack(found.logits, 1)


@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("window", [None, 5])
def test_tokens_do_not_follow_the_kind_of_cache(tiny, prompts, cache, window):
    model = tiny(*([] if window is None else ["Mistral"]), **({} if window is None else {"sliding_window": window}))
    with invariant(model):
        tokens, logits = drawn(model, prompts, cache_implementation=cache)
        for row, prompt in enumerate(prompts):
            alone, of_alone = drawn(model, [prompt])
            assert torch.equal(tokens[row], alone[0])
            assert torch.equal(logits[row], of_alone[0])
            # What the whole sequence gives in training.
            whole = torch.cat((prompt, alone[0]))[None]
            scored = model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
            assert torch.equal(scored, of_alone[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_change_no_bit(tiny, prompts, reentrant):
    model = tiny().train()
    batch = padded(prompts)
    upstream = torch.randn(*batch["input_ids"].shape, 211, generator=torch.Generator().manual_seed(2))
    upstream *= batch["attention_mask"][..., None]

    def gradients():
        model.zero_grad()
        model(**batch, use_cache=False).logits.backward(upstream)
        return [value.grad.clone() for value in model.parameters()]

    with invariant(model):
        plain = gradients()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for value, other in zip(gradients(), plain, strict=True):
            assert torch.equal(value, other)


def adapted(model):
    """Return a model with LoRA adapters that do something."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    made = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    for name, value in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value.data, std=0.2)
    return made.eval()


@pytest.mark.parametrize("first", ["adapters", "invariant"])
def test_adapters(tiny, prompts, first):
    model = tiny()
    handle = invariant(model) if first == "invariant" else None
    adapter = adapted(model)
    with invariant(adapter), torch.no_grad():
        batch = padded(prompts)
        logits = adapter(**batch, use_cache=False).logits
        for row, prompt in enumerate(prompts):
            assert torch.equal(logits[row, -len(prompt) :], adapter(prompt[None], use_cache=False).logits[0])
    if handle is not None:
        handle.undo()
    assert not [name for name, module in adapter.named_modules() if "RowWise" in type(module).__name__]


def test_gradients_of_adapters_do_not_follow_the_padding(tiny, prompts):
    adapter = adapted(tiny()).train()
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
        for value, other in zip(gradients(0), gradients(2), strict=True):
            assert torch.equal(value, other)
