"""What a causal language model of transformers makes of its last hidden states, beside its head."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rl_kernels.models.swap import replaced

CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What models of transformers call the bound of their logits."""
FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
"""What models of transformers call a factor of their logits; Granite and MiniCPM3 divide by ``logits_scaling``."""
LARGE, CLOSE = 40.0, 0.02
"""The largest product with a head, and how far logits may be off, in shares of the largest: BF16 rounds to 0.004."""


def logit_options(model: Any) -> dict[str, float]:
    """Return what a causal language model of transformers does to its logits, as options of ``linear_logp``."""
    config = model.config.get_text_config()
    softcap = next(filter(None, (getattr(config, name, None) for name in CAPS)), 0.0)
    return {"softcap": float(softcap), "logit_scale": _factor(config)}


def check_logits(
    model: Any, score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], temperature: float = 1.0
) -> None:
    """Hold log-probabilities that are scored through a model's head to its own logits, of a few random hidden states.

    A head of which this process holds no whole weight, as of a shard, is not looked at.

    Args:
        model: a causal language model of transformers.
        score: returns the log-probabilities ``[N]`` of tokens ``[N]`` given hidden states ``[N, D]``.
        temperature: that they are of.

    Raises:
        TypeError: they differ, as where a layer stands between the last hidden states and the head; or the model has no
            body that gives last hidden states.
    """
    if model.base_model is model:
        raise TypeError(f"model: expected a body that gives last hidden states, {type(model).__name__} has none")
    head, embedded = model.get_output_embeddings(), model.get_input_embeddings().weight
    weight = getattr(head, "weight", embedded)
    if not is_whole(weight):
        return
    source = torch.Generator().manual_seed(0)
    drawn = torch.randn(4, weight.shape[1], generator=source, dtype=torch.float32, device="cpu")
    with torch.no_grad(), in_mode(model, training=False):
        hidden = drawn.to(weight.device, embedded.dtype)
        # A head that is not taken is refused before it is called.
        score(hidden, torch.zeros(4, dtype=torch.int64, device=weight.device))
        # So large that what bounds logits shows.
        most = min(1e6, torch.finfo(hidden.dtype).max / 2)
        factor = min(LARGE / max(float(head(hidden).abs().max()), 1e-9), most / float(drawn.abs().max()))
        hidden = (drawn * factor).to(hidden)
        ids = torch.arange(4, device=embedded.device)[None]
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "return_dict": True}
        logits = _logits_of(model, hidden[None].to(embedded.device), given)
        if logits is None:
            try:
                hidden = model.base_model(**given).last_hidden_state[0].to(weight.device)
                logits = model(**given).logits
            except Exception as error:  # whatever else it wants beside tokens
                warnings.warn(f"model: its logits could not be held to what is scored: {error}", stacklevel=3)
                return
    logits = logits[0].float()
    targets = torch.stack((logits.argmax(-1), logits.argmin(-1)), 1)
    expected = (logits / temperature).log_softmax(-1).gather(-1, targets)
    with torch.no_grad():
        scored = score(hidden.repeat_interleave(2, 0), targets.flatten().to(hidden.device)).view(expected.shape)
    away = float((scored.to(expected.device) - expected).abs().max()) * temperature
    if not away <= CLOSE * float(logits.abs().max()):
        expectation = "expected logits that follow from the last hidden states and the head"
        raise TypeError(f"model: {expectation}, those of {type(model).__name__} are {away:.3g} off")


def is_whole(weight: torch.Tensor) -> bool:
    """Say whether this process holds a matrix and its values, no shard of it."""
    return weight.ndim == 2 and bool(weight.numel()) and not weight.is_meta and not hasattr(weight, "full_tensor")


def _logits_of(model: Any, hidden: torch.Tensor, given: dict[str, Any]) -> torch.Tensor | None:
    """Return the logits of last hidden states ``[1, N, D]``; None of a model that calls another body, or wants more."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Output(BaseModelOutputWithPast):
        """All else that a model may ask its body for is None."""

        def __getattr__(self, name: str) -> None:
            return None

    called = []

    def body(*args: Any, **options: Any) -> Output:
        called.append(True)
        return Output(last_hidden_state=hidden)

    try:
        with replaced(model.base_model, "forward", body):
            found: torch.Tensor = model(**given).logits
    except Exception:  # whatever else it does with it
        return None
    return found if called else None


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Have all modules of a model train, or none."""
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
