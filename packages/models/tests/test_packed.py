"""Rows of several sequences under invariant(): each sequence has the bits that it has alone, or the call raises."""

import pytest
import torch

from rl_kernels.models import invariant
from rl_kernels.models import packed as packed_rows

transformers = pytest.importorskip("transformers")
LENGTHS = (7, 1, 1, 12, 5)
WINDOWS = {"head_dim": 8, "sliding_window": 4}
FAMILIES = {"Llama": {}, "Mistral": {"sliding_window": 6}, "Gemma3Text": WINDOWS, "GPT2": {}, "StableLm": {}}
FAMILIES |= {"Qwen3Moe": {}, "GptOss": {}, "DeepseekV3": {}}
"""StableLm does not pass the lengths of sequences on to its attention."""


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 211, (length,), generator=generator) for length in LENGTHS]


def packed(sequences):
    """Return a row as TRL and ``DataCollatorWithFlattening`` make it."""
    places = torch.cat([torch.arange(len(ids)) for ids in sequences])
    return {"input_ids": torch.cat(sequences)[None], "position_ids": places[None]}


def with_padding(row, *, left):
    """Return the row with three tokens of padding, whose positions are those that ``generate`` gives them."""
    pads = torch.zeros(1, 3).long(), (3, 0) if left else (0, 3)
    mask = torch.nn.functional.pad(torch.ones_like(row["input_ids"]), pads[1])
    return {name: torch.nn.functional.pad(x, pads[1], value=1) for name, x in row.items()} | {"attention_mask": mask}


def lengths():
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone(), "max_length_q": 12, "max_length_k": 12}


@pytest.mark.smoke
@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_of_a_row_are_those_alone(tiny, sequences, family, device):
    model, row = tiny(family, device=device, **FAMILIES[family]), packed(sequences)
    left, right = with_padding(row, left=True), with_padding(row, left=False)
    both = {name: torch.cat((left[name], right[name])) for name in left}
    ones = torch.ones_like(row["input_ids"])
    calls = {
        "the default call": (row, slice(None)),
        "without a cache": (row | {"use_cache": False}, slice(None)),
        "a mask of ones": (row | {"attention_mask": ones}, slice(None)),
        "lengths": (row | lengths(), slice(None)),
        "padded on the left": (left, slice(3, None)),
        "padded on the right": (right, slice(0, -3)),
        "in a batch": (both, slice(3, None)),
    }
    with invariant(model, strict=True), torch.no_grad():
        alone = torch.cat([model(ids[None].to(device)).logits[0] for ids in sequences])
        for what, (call, own) in calls.items():
            given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
            assert torch.equal(model(**given).logits[0, own], alone), what
        # The row that is padded on the right is the second one; positions may be given once for a batch.
        assert torch.equal(model(**{name: x.to(device) for name, x in both.items()}).logits[1, :-3], alone)
        ids, places = row["input_ids"].to(device), row["position_ids"].to(device)
        rows = ids.expand(2, -1)
        found = model(rows, None, places) if family == "Llama" else model(rows, position_ids=places)
        assert torch.equal(found.logits[1], alone)
        # The keys of packed sequences cannot be continued.
        assert found.past_key_values is None
        with pytest.raises(ValueError, match="position_ids: expected one sequence per row with past_key_values"):
            model(ids, position_ids=places, past_key_values=transformers.DynamicCache(config=model.config))


def test_gradients_of_packed_rows_with_checkpoints(tiny, sequences):
    model, row = tiny().train(), packed(sequences)

    def gradients(*rows):
        model.zero_grad()
        torch.cat([model(**each).logits[0] for each in rows]).square().sum().backward()
        return [value.grad.clone() for value in model.parameters()]

    with invariant(model):
        plain = gradients(row)
        for reentrant in (True, False):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert all(map(torch.equal, gradients(row), plain)), reentrant
        alone = gradients(*({"input_ids": ids[None]} for ids in sequences))
    for value, other in zip(plain, alone, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_positions_of_one_sequence_start_no_other(tiny, prompts):
    """Positions that a cache continues, a prompt behind padding, and drafts of several tokens at once."""
    model, ids = tiny(), prompts[2][None]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    places, cache = torch.arange(33)[None], transformers.DynamicCache(config=model.config)
    with invariant(model), torch.no_grad():
        cuts = [slice(0, 5), slice(5, 6), slice(6, 33)]
        parts = [model(ids[:, s], position_ids=places[:, s], past_key_values=cache).logits for s in cuts]
        assert torch.equal(torch.cat(parts, 1), model(ids).logits)
        tokens = model.generate(ids, **options)[0, 33:]
        padded, mask = torch.nn.functional.pad(ids, (4, 0)), torch.nn.functional.pad(torch.ones_like(ids), (4, 0))
        assert torch.equal(model.generate(padded, attention_mask=mask, **options)[0, 37:], tokens)
        for drafts in ({"assistant_model": tiny()}, {"prompt_lookup_num_tokens": 3}):
            assert torch.equal(model.generate(ids, **drafts, **options)[0, 33:], tokens)


def test_positions_of_images_and_text():
    """Two sequences of positions [3, B, T]; the first holds an image of 2 x 2 after a token, the other is text."""
    image = torch.tensor([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
    row = torch.cat((image, torch.arange(4).expand(3, -1), torch.zeros(3, 1).long()), 1)[:, None]
    assert packed_rows.sequences(image[:, None], None) is None
    assert packed_rows.sequences(row.expand(-1, 2, -1), None).tolist() == [0, 6, 10, 11, 17, 21, 22]


@pytest.mark.filterwarnings("ignore:model. left alone")
@torch.no_grad()
def test_models_of_images_and_text(sequences):
    text = {"vocab_size": 211, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    text |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "sliding_window": 4, "pad_token_id": 0}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with invariant(model):
        alone = torch.cat([model(ids[None]).logits[0] for ids in sequences])
        assert torch.equal(model(**packed(sequences)).logits[0], alone)


@pytest.mark.filterwarnings("ignore:model. left alone")
@torch.no_grad()
def test_a_model_with_attention_of_its_own_does_not_mix_them(tiny, sequences):
    model, row = tiny("GPTJ", n_embd=32, n_layer=2, n_head=4, rotary_dim=4), packed(sequences)
    with invariant(model):
        alone = torch.cat([model(ids[None]).logits[0] for ids in sequences])
        torch.testing.assert_close(model(**row, use_cache=False).logits[0], alone, rtol=1e-4, atol=1e-4)
        for more in ({}, {"attention_mask": torch.ones_like(row["input_ids"]), "use_cache": False}):
            with pytest.raises(ValueError, match="position_ids: expected one sequence per row, or use_cache=False"):
                model(**row, **more)
