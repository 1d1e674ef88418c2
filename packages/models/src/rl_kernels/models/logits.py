"""The scale and the soft cap of the logits of a causal language model of transformers, and a check of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rl_kernels.models.swap import replaced

CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names of the config attribute that bounds the logits of models of transformers."""
FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
"""Names of the config attribute that multiplies logits; Granite and MiniCPM3 divide by ``logits_scaling``."""
LARGE, CLOSE = 40.0, 0.02
"""The largest logit of the probe, and the allowed error as a share of that logit; BF16 rounds to 0.004."""


def logit_options(model: Any) -> dict[str, float]:
    """Return the soft cap and the scale of a model's logits, as options of ``linear_logp``."""
    config = model.config.get_text_config()
    softcap = next(filter(None, (getattr(config, name, None) for name in CAPS)), 0.0)
    return {"softcap": float(softcap), "logit_scale": _factor(config)}


def check_logits(
    model: Any, score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], temperature: float = 1.0
) -> None:
    """Compare scores through a model's head with log-probabilities of its own logits, on random hidden states.

    Does nothing if this process does not hold the whole weight of the head, as with a shard.

    Args:
        model: a causal language model of transformers.
        score: takes hidden states ``[N, D]`` and tokens ``[N]``, returns the log-probabilities ``[N]``.
        temperature: the divisor of the logits in ``score``.

    Raises:
        TypeError: the log-probabilities differ, for example because a layer stands between the last hidden states and
            the head; or the model has no base_model that returns last hidden states.
    """
    if model.base_model is model:
        raise TypeError(f"model: expected a base_model that gives last hidden states, {type(model).__name__} has none")
    head, embedded = model.get_output_embeddings(), model.get_input_embeddings().weight
    weight = getattr(head, "weight", embedded)
    if not is_whole(weight):
        return
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, weight.shape[1], generator=generator, dtype=torch.float32, device="cpu")
    with torch.no_grad(), in_mode(model, training=False):
        hidden = noise.to(weight.device, embedded.dtype)
        # An unsupported head is refused before it is called.
        score(hidden, torch.zeros(4, dtype=torch.int64, device=weight.device))
        # Logits large enough to show a soft cap.
        largest = min(1e6, torch.finfo(hidden.dtype).max / 2)
        factor = min(LARGE / max(float(head(hidden).abs().max()), 1e-9), largest / float(noise.abs().max()))
        hidden = (noise * factor).to(hidden)
        ids = torch.arange(4, device=embedded.device)[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "return_dict": True}
        logits = _logits_of(model, hidden[None].to(embedded.device), inputs)
        if logits is None:
            try:
                hidden = model.base_model(**inputs).last_hidden_state[0].to(weight.device)
                logits = model(**inputs).logits
            except Exception as error:  # it may need more than tokens
                warnings.warn(f"model: could not compare its logits with the scores: {error}", stacklevel=3)
                return
    logits = logits[0].float()
    targets = torch.stack((logits.argmax(-1), logits.argmin(-1)), 1)
    expected = (logits / temperature).log_softmax(-1).gather(-1, targets)
    with torch.no_grad():
        scored = score(hidden.repeat_interleave(2, 0), targets.flatten().to(hidden.device)).view(expected.shape)
    difference = float((scored.to(expected.device) - expected).abs().max()) * temperature
    if not difference <= CLOSE * float(logits.abs().max()):
        expectation = "expected logits that follow from the last hidden states and the head"
        raise TypeError(f"model: {expectation}, those of {type(model).__name__} are {difference:.3g} off")


def is_whole(weight: torch.Tensor) -> bool:
    """Say whether this process holds a whole matrix with values, not a shard of it."""
    return weight.ndim == 2 and bool(weight.numel()) and not weight.is_meta and not hasattr(weight, "full_tensor")


def _logits_of(model: Any, hidden: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor | None:
    """Return the logits of last hidden states ``[1, N, D]``; None if the model needs more than these."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Output(BaseModelOutputWithPast):
        """Returns None for all other attributes that a model may read."""

        def __getattr__(self, name: str) -> None:
            return None

    called = []

    def body(*args: Any, **options: Any) -> Output:
        called.append(True)
        return Output(last_hidden_state=hidden)

    try:
        with replaced(model.base_model, "forward", body):
            logits: torch.Tensor = model(**inputs).logits
    except Exception:  # it needs more than this output
        return None
    return logits if called else None


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put all modules of a model in training or eval mode, and restore their modes at the end."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _factor(config: Any) -> float:
    for name in FACTORS:
        value = getattr(config, name, None)
        if value is not None:
            return float(value)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling if config.model_type == "hyperclovax" else 1 / scaling)
