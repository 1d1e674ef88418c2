"""Small models with random weights, prompts, and batches of them."""

import os

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import pad

from rl_kernels.core.triton_lib.launch import INTERPRETED

VOCAB = 211
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **TOKENS}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 8}
"""Attention of DeepSeek, and a first layer without experts."""
MIXTURES = {
    "Qwen3Moe": {"head_dim": 16, "norm_topk_prob": True},
    "Qwen2Moe": {"shared_expert_intermediate_size": 40},
    "Mixtral": {},
    "Olmoe": {},
    "GptOss": {"head_dim": 16, "sliding_window": 5},
    "Glm4Moe": {"head_dim": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_routed_experts": 8},
    "DeepseekV3": {"n_group": 4, "topk_group": 2, **LATENT},
    "GraniteMoe": {},
    "Phimoe": {"num_experts_per_tok": 2},
    "DeepseekV2": {"n_group": 1, "topk_group": 1, **LATENT},
    "Glm4MoeLite": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, **LATENT},
    "GraniteMoeShared": {"shared_intermediate_size": 40},
    "Cohere2Moe": {"head_dim": 16},
    "FlexOlmo": {},
    "Afmoe": {"head_dim": 16},
    "Laguna": {"head_dim": 16},
}
"""Families of mixtures, with what makes each its own."""
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


@pytest.fixture
def tiny():
    """Return a maker of two-layer models of transformers; norm weights are drawn too, so that none of them is 1."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")

    def make(name="Llama", dtype=torch.float32, device="cpu", **options):
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        mixture = EXPERTS | MIXTURES[name] if name in MIXTURES else {}
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **heads, **mixture, **options})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for value in model.parameters():
            # The usual 0.02 makes everything after the first layer too flat to tell one bit from another.
            nn.init.uniform_(value, 0.5, 1.5) if value.ndim == 1 else nn.init.normal_(value, std=0.2)
        for name, value in model.named_buffers():
            if name.endswith("correction_bias"):
                nn.init.normal_(value, std=0.2)
        return model.to(device=device, dtype=dtype)

    return make


@pytest.fixture
def prompts():
    """Return token ids of several lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in (19, 7, 33, 2, 16)]


@pytest.fixture
def padded():
    """Return a maker of batches, as a tokenizer and ``generate`` make them, and of where each prompt stands in it."""

    def make(prompts, *, left=True, more=0):
        width = max(map(len, prompts)) + more
        first = [width - len(ids) if left else 0 for ids in prompts]
        sides = [(start, width - start - len(ids)) for start, ids in zip(first, prompts, strict=True)]
        ids = torch.stack([pad(ids, side) for ids, side in zip(prompts, sides, strict=True)])
        mask = torch.stack([pad(torch.ones_like(ids), side) for ids, side in zip(prompts, sides, strict=True)])
        places = [(row, slice(start, start + len(prompts[row]))) for row, start in enumerate(first)]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}, places

    return make


@pytest.fixture
def surroundings(padded):
    """Return a function that yields (what, prompt, its logits): first alone, then in all that must change no bit.

    The longest prompt comes in chunks too: a cut is the size of all chunks, or a list of sizes.
    """

    @torch.no_grad()
    def each(model, prompts, cuts, device="cpu"):
        def run(**inputs):
            return model(**{n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in inputs.items()})

        for index, prompt in enumerate(prompts):
            yield "alone", index, run(input_ids=prompt[None], use_cache=False).logits[0]
        for what, given in {"left": {"left": True, "more": 3}, "right": {"left": False, "more": 5}}.items():
            batch, places = padded(prompts, **given)
            logits = run(**batch, use_cache=False).logits
            for index, place in enumerate(places):
                yield what, index, logits[place]
        longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
        for cut in cuts:
            cache, parts = None, []
            for part in prompts[longest].split(cut):
                output = run(input_ids=part[None], past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                parts.append(output.logits[0])
            yield f"chunks of {cut}", longest, torch.cat(parts)
        batch, places = padded(prompts)
        half, cache, parts = batch["input_ids"].shape[1] // 2, None, []
        for step in (slice(0, half), slice(half, None)):
            seen = {"attention_mask": batch["attention_mask"][:, : step.stop]}
            given = {name: batch[name][:, step] for name in ("input_ids", "position_ids")}
            output = run(**given, **seen, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        logits = torch.cat(parts, 1)
        for index, place in enumerate(places):
            yield "batch in chunks", index, logits[place]

    return each


@pytest.fixture
def one_process(tmp_path):
    """Be a group of one process, which shards nothing but goes through everything."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def triton_on(device):
    """Return a device on which Triton runs."""
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("needs a GPU, or Triton's interpreter")
    return device


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def triton_dtype(request, triton_on):
    """Return a dtype of the tests of Triton kernels."""
    if triton_on.type == "cpu" and request.param == torch.bfloat16:
        pytest.skip("Triton's interpreter cuts numbers to BF16 and does not round them")
    return request.param
