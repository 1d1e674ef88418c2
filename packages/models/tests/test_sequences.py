"""sequence_logp(): a rollout scored the update's way has its bits, in other batches, padded, packed and alone."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from rl_kernels.models import head_logp, invariant, sequence_logp

NEW, END = 9, 2


def generated(model, batch, **options):
    """Return the sequences of ``generate``, from prompts padded on the left, and their mask."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    options = {"max_new_tokens": NEW, "do_sample": True, "pad_token_id": 0, "eos_token_id": END, **options}
    found = model.generate(ids, attention_mask=mask, **options)
    new = found[:, ids.shape[1] :] == END
    return found, torch.cat((mask, (new.long().cumsum(1) - new.long() == 0).long()), 1)


def alone(model, ids, mask, **options):
    """Return the log-probs of each sequence, without its padding and in a batch of one."""
    return [sequence_logp(model, row[kept.bool()][None], **options)[0] for row, kept in zip(ids, mask, strict=True)]


@pytest.mark.parametrize(
    ("name", "options"), [("Llama", {}), ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 3.0}), ("Qwen2", {})]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rollout_has_the_bits_of_the_update(name, options, dtype, tiny, prompts, padded):
    model = tiny(name, dtype, tie_word_embeddings=name == "Qwen2", **options)
    with invariant(model, strict=True):
        ids, mask = generated(model, padded(prompts)[0])
        with torch.no_grad():
            old = sequence_logp(model, ids, mask, temperature=0.7)
        assert old.shape == (len(ids), ids.shape[1] - 1)
        scored = mask[:, 1:].bool() & mask[:, :-1].bool()
        assert not old[~scored].any()
        assert (old[scored] < 0).all()
        old = [row[kept] for row, kept in zip(old, scored, strict=True)]
        assert all(map(torch.equal, old, alone(model, ids, mask, temperature=0.7)))
        rows = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
        for part in (slice(0, 2), slice(2, 5)):  # micro-batches, padded on the right
            batch = nn.utils.rnn.pad_sequence(rows[part], batch_first=True)
            sizes = torch.tensor([len(row) for row in rows[part]])
            found = sequence_logp(model, batch, (torch.arange(batch.shape[1]) < sizes[:, None]).long(), temperature=0.7)
            for row, size, expected in zip(found, sizes, old[part], strict=True):
                assert torch.equal(row[: size - 1], expected)
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        found = sequence_logp(model, torch.cat(rows)[None], position_ids=positions, temperature=0.7)
        starts = positions[0, 1:] == 0
        assert torch.equal(found[0][~starts], torch.cat(old))
        found.sum().backward()
    logits = model(rows[0][None]).logits.float() / 0.7
    expected = logits[0, :-1].log_softmax(-1).gather(-1, rows[0][1:, None])[:, 0]
    torch.testing.assert_close(old[0], expected, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0)


def adapted(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def adapted_in_kinds(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False), mixed=True)


def split(model):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize("wrap", [adapted, adapted_in_kinds, split, sharded, nn.parallel.DistributedDataParallel])
@pytest.mark.usefixtures("one_process")
def test_wrapped_models(wrap, tiny, prompts):
    model, ids = tiny(), prompts[0][None]
    base, is_adapted = model, wrap in (adapted, adapted_in_kinds)
    if is_adapted:
        model = wrap(model)
    invariant(model)
    hidden = base.model(ids).last_hidden_state
    expected = head_logp(base.lm_head, hidden[:, :-1], ids[:, 1:]).detach()
    model = model if is_adapted else wrap(model)
    found = sequence_logp(model, ids)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)


@torch.no_grad()
def test_called_in_a_compiled_function(tiny, prompts):
    model, ids = tiny(), prompts[0][None]
    with invariant(model):
        expected = sequence_logp(model, ids)
        found = torch.compile(lambda ids: sequence_logp(model, ids) * 2, backend="eager")(ids)
    assert torch.equal(found, expected * 2)


@pytest.mark.smoke
def test_what_it_cannot_score_it_names(tiny):
    model, ids = tiny(), torch.ones(2, 5, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"^model: expected a causal language model of transformers, got Linear"):
        sequence_logp(nn.Linear(2, 2), ids)
    with pytest.raises(ValueError, match=r"^input_ids: expected \[B, T\] and not empty, got shape \(0, 5\)"):
        sequence_logp(model, ids[:0])
    with pytest.raises(ValueError, match=r"^input_ids: expected \[B, T\] and not empty, got shape \(5,\)"):
        sequence_logp(model, ids[0])
    with pytest.raises(ValueError, match=r"^ignore_index: padding is ignored by attention_mask"):
        sequence_logp(model, ids, ignore_index=1)
    with pytest.raises(ValueError, match=r"^attention_mask: expected the shape of input_ids, \(2, 5\), got \(2, 4\)"):
        sequence_logp(model, ids, ids[:, 1:])
    model._original_forward = model.forward
    with pytest.raises(ValueError, match=r"^model: accelerate runs it in mixed precision; call this within accelerat"):
        sequence_logp(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert sequence_logp(model, ids).dtype == torch.float32
    model.config.is_encoder_decoder = True
    with pytest.raises(TypeError, match=r"^model: expected a decoder alone, LlamaForCausalLM has an encoder"):
        sequence_logp(model, ids)
