"""vLLM on our operators: rollouts whose log-probabilities are the trainer's, bit for bit. For vLLM 0.24 to 0.33.

vLLM loads this package by itself (entry point group ``vllm.general_plugins``). With ``RL_KERNELS_VLLM=1``, or after
``enable()``, a model's attention runs on ``det_attention`` over vLLM's pages (the backend ``CUSTOM``, then the
default), its norms on ``rms_norm``, its linear layers on ``det_linear``, a mixture's routers and experts on ``route``
and ``experts``, rotary embedding and gates on the functions that ``invariant(model)`` uses, and logits and the
log-probability of a sampled token come from ``linear_logits``. A model of transformers under ``invariant`` with
``head_logp`` then computes the same bits for the same tokens. Chunked prefill, prefix caching and CUDA graphs stay on,
with both of vLLM's model runners. ``refusals`` raises an error that names an option that is not covered.
"""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["enable", "register"]

VARIABLE = "RL_KERNELS_VLLM"


def enable() -> None:
    """Turn the plugin on for the engines that this process makes from now on, as ``RL_KERNELS_VLLM=1`` does.

    Call it before an engine, or a trainer with one, is made. A server started elsewhere needs the variable.

    Raises:
        RuntimeError: vLLM has loaded its plugins already, without this one.
    """
    plugins = sys.modules.get("vllm.plugins")
    if getattr(plugins, "plugins_loaded", False) and os.environ.get(VARIABLE) != "1":
        raise RuntimeError(f"enable: call it before vLLM makes an engine, or set {VARIABLE}=1")
    os.environ[VARIABLE] = "1"


def register() -> None:
    """Replace vLLM's layers, if ``RL_KERNELS_VLLM`` is 1; vLLM calls this in each of its processes.

    Raises:
        ValueError: the variable is neither empty nor 0 nor 1.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}: expected 0 or 1, got {value!r}")
    if value == "1":
        from rl_kernels.models.clients.vllm import attention, layers, logprobs, mixtures, outputs, refusals

        attention.install()
        layers.install()
        mixtures.install()
        logprobs.install()
        outputs.install()
        refusals.install()
        # vLLM shows what its own loggers say.
        logging.getLogger("vllm.rl_kernels").info(
            "rl-kernels: attention, norms, linear layers and log-probs are its own (%s=1)", VARIABLE
        )
