"""Small models with random weights, as several tests want them."""

import os

import pytest
import torch
from torch import nn

VOCAB = 211


@pytest.fixture
def tiny():
    """Return a maker of two-layer models of transformers; norm weights are drawn too, so that none of them is 1."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")

    def make(name="Llama", dtype=torch.float32, device="cpu", **options):
        sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = getattr(transformers, f"{name}Config")(
            **{
                **sizes,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                **options,
            }
        )
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
