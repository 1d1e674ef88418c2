"""Let verl's FSDP engine combine fused kernels with one temperature per sample, which it refuses by itself."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rl_kernels.models.clients.verl.forward import is_ours

KNOWN = "0.9.1"
"""The version of verl that has these hooks."""
MODULE = "verl.workers.engine.fsdp.transformer_impl"
ENGINE, METHOD = "FSDPEngineWithLMHead", "prepare_model_inputs"
FUSED = "use_fused_kernels"


def install(module: ModuleType) -> None:
    """Make the engine pass temperatures to the model's forward.

    Raises:
        ImportError: the module does not have the engine of verl 0.9.1.
    """
    kind = getattr(module, ENGINE, None)
    original = getattr(kind, METHOD, None)
    if original is None:
        raise ImportError(f"verl: expected the hooks of verl {KNOWN}, {MODULE}.{ENGINE}.{METHOD} is missing")
    if hasattr(original, "replaced"):
        return

    def prepare_model_inputs(self: Any, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        from verl.utils import tensordict_utils

        is_fused = tensordict_utils.get_non_tensor_data(data=micro_batch, key=FUSED, default=False)
        differs = isinstance(micro_batch["temperature"], torch.Tensor)
        if not is_fused or not differs or not is_ours(_innermost(self.module)):
            result: tuple[dict[str, Any], dict[str, Any]] = original(self, micro_batch)
            return result
        # The path for logits packs, pads and cuts temperatures like the tokens.
        tensordict_utils.assign_non_tensor(micro_batch, **{FUSED: False})
        try:
            inputs, output_args = original(self, micro_batch)
        finally:
            tensordict_utils.assign_non_tensor(micro_batch, **{FUSED: True})
        inputs["return_dict"] = True
        if "temperature_rmpad" in output_args:
            inputs["temperature"] = output_args["temperature_rmpad"].unsqueeze(0)
            inputs["shift_labels"] = output_args["input_ids_rmpad_rolled"].unsqueeze(0)
        else:
            inputs["temperature"] = output_args["temperature"]
        return inputs, output_args

    prepare_model_inputs.replaced = original  # type: ignore[attr-defined]
    setattr(kind, METHOD, prepare_model_inputs)


def _innermost(module: Any) -> Any:
    """Return the model of transformers inside the wrappers of FSDP and PEFT."""
    while hasattr(module, "module"):
        module = module.module
    return module.get_base_model() if hasattr(module, "get_base_model") else module
