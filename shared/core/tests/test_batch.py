import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_kernels.core.testing import RLBatch, bits_of, make_synthetic_rl_kernel_batch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TENSORS = [field.name for field in dataclasses.fields(RLBatch) if field.name != "metadata"]
FLOATS = ("rewards", "advantages", "old_logps", "ref_logps")


def test_shapes_and_dtypes():
    batch = make_synthetic_rl_kernel_batch(3, 4, 5, 7, 11, 0.5, torch.bfloat16, "cpu", 1)
    per_token = {"completion_mask", *batch.per_token()}
    assert per_token == {"completion_mask", "token_ids", "old_logps", "ref_logps"}
    assert all(value is getattr(batch, name) for name, value in batch.per_token().items())
    shapes = {"input_ids": (12, 12), "attention_mask": (12, 12), "prompt_mask": (12, 5)}
    shapes |= {"rewards": (12,), "advantages": (12,), "valid_indices": (batch.metadata["valid_tokens"],)}
    assert {name: getattr(batch, name).shape for name in TENSORS} == shapes | dict.fromkeys(per_token, (12, 7))
    dtypes = {name: getattr(batch, name).dtype for name in TENSORS}
    assert {dtypes[name] for name in TENSORS if name.endswith("_mask")} == {torch.bool}
    assert {dtypes[name] for name in ("input_ids", "token_ids", "valid_indices")} == {torch.int64}
    assert {dtypes[name] for name in FLOATS} == {torch.bfloat16}


@given(
    prompts=st.integers(1, 4),
    samples=st.integers(1, 5),
    prompt_len=st.integers(1, 6),
    completion_len=st.integers(1, 9),
    vocab=st.integers(1, 20),
    density=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=40, deadline=None)
def test_what_holds_for_every_batch(prompts, samples, prompt_len, completion_len, vocab, density, dtype, seed):
    arguments = (prompts, samples, prompt_len, completion_len, vocab, density, dtype, "cpu", seed)
    batch = make_synthetic_rl_kernel_batch(*arguments)
    prompt_ids, completion_ids = batch.input_ids.split((prompt_len, completion_len), 1)
    assert torch.equal(completion_ids, batch.token_ids)
    assert torch.equal(batch.attention_mask, torch.cat((batch.prompt_mask, batch.completion_mask), 1))
    assert ((batch.input_ids >= 0) & (batch.input_ids < vocab)).all()

    first_of_each = torch.arange(prompts).repeat_interleave(samples) * samples
    for shared in (prompt_ids, batch.prompt_mask):
        assert torch.equal(shared, shared[first_of_each])
    assert (batch.prompt_mask.sum(1) * 2 >= prompt_len).all()
    # Padding is on the left of prompts and on the right of completions: a mask never falls, or never rises.
    assert (batch.prompt_mask.int().diff() >= 0).all()
    assert (batch.completion_mask.int().diff() <= 0).all()

    masked = ~batch.completion_mask
    assert (batch.input_ids[~batch.attention_mask] == 0).all()
    for logps in (batch.old_logps, batch.ref_logps):
        assert logps.isfinite().all()
        assert (logps <= 0).all()
        assert (logps[masked] == 0).all()
    assert torch.equal(batch.valid_indices, batch.completion_mask.flatten().nonzero()[:, 0])
    assert batch.metadata["valid_tokens"] == len(batch.valid_indices) == int(batch.attention_mask[:, prompt_len:].sum())

    groups = batch.rewards.double().view(prompts, samples)
    expected = (groups - groups.mean(1, keepdim=True)) / groups.std(1, correction=0, keepdim=True).clamp(min=1e-6)
    torch.testing.assert_close(batch.advantages, expected.flatten().to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


def test_spread_of_lengths_and_policies():
    for density in (0.0, 0.2, 0.5, 0.75, 1.0):
        mask = make_synthetic_rl_kernel_batch(64, 8, 2, 40, valid_density=density).completion_mask
        assert abs(float(mask.double().mean()) - density) < (0.03 if 0 < density < 1 else 1e-9)
        assert density in (0, 1) or len(mask.sum(1).unique()) > 5
    batch = make_synthetic_rl_kernel_batch(8, 8)
    assert 0.05 < (batch.ref_logps - batch.old_logps)[batch.completion_mask].double().std() < 0.15
    assert len(batch.rewards.unique()) > 60


def test_the_arguments_alone_decide_the_bits(device):
    before = torch.get_rng_state()
    for dtype in DTYPES:
        one, two = (make_synthetic_rl_kernel_batch(dtype=dtype, seed=3, device=place) for place in ("cpu", device))
        other = make_synthetic_rl_kernel_batch(dtype=dtype, seed=4)
        for name in TENSORS:
            here, there = getattr(one, name), getattr(two, name)
            assert there.device.type == device.type
            if here.is_floating_point():
                here, there = bits_of(here), bits_of(there)
            assert torch.equal(here, there.cpu()), name
        assert not torch.equal(one.input_ids, other.input_ids)
        assert not torch.equal(one.old_logps, other.old_logps)
    assert torch.equal(torch.get_rng_state(), before)


def test_metadata_has_the_arguments_and_cannot_change():
    batch = make_synthetic_rl_kernel_batch(3, 2, seed=9, dtype=torch.bfloat16, device=torch.device("cpu"))
    facts = dict(batch.metadata)
    assert facts.pop("valid_tokens") == int(batch.completion_mask.sum())
    assert facts == {
        **{"num_prompts": 3, "samples_per_prompt": 2, "prompt_len": 8, "completion_len": 16, "vocab_size": 257},
        **{"valid_density": 0.75, "dtype": "bfloat16", "device": "cpu", "seed": 9},
    }
    with pytest.raises(TypeError):
        batch.metadata["seed"] = 1


BAD = {
    **dict.fromkeys(("num_prompts", "samples_per_prompt", "prompt_len"), (0, -1, 2.0, "2", True)),
    **dict.fromkeys(("completion_len", "vocab_size"), (0, -1, 2.5, None)),
    "valid_density": (-0.1, 1.1, float("nan"), "half", True),
    "dtype": (torch.int32, torch.bool, "float32", None),
    "device": ("no_such", "cuda:99", 3.5),
    "seed": (-1, 1.0, None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named(name):
    for value in BAD[name]:
        with pytest.raises(ValueError, match=f"^{name}: expected "):
            make_synthetic_rl_kernel_batch(**{name: value})
