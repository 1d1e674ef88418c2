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


@pytest.fixture
def tiny():
    """Return a maker of two-layer models of transformers; norm weights are drawn too, so that none of them is 1."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")

    def make(name="Llama", dtype=torch.float32, device="cpu", **options):
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **heads, **options})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for value in model.parameters():
            # The usual 0.02 makes everything after the first layer too flat to tell one bit from another.
            nn.init.uniform_(value, 0.5, 1.5) if value.ndim == 1 else nn.init.normal_(value, std=0.2)
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
