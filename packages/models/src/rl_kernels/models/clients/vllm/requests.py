"""Options of a request that leave processed log-probs equal to the model's, and a mark. Does not import vLLM."""

from __future__ import annotations

MARK = "rl_kernels"
"""Key of ``additional_config`` in the configuration of an engine with the plugin; a server shows it to its clients."""
PROCESSED = "processed_logprobs"
"""Mode of log-probs of the distribution that is sampled from, after temperature and masks; trainers use it."""
PLAIN: dict[str, tuple[object, ...]] = {
    **{"temperature": (1.0, 0.0), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "min_tokens": (0,)},
    **{"presence_penalty": (0.0,), "frequency_penalty": (0.0,), "repetition_penalty": (1.0,)},
    **{"logit_bias": (None, {}), "allowed_token_ids": (None,), "bad_words": (None, []), "structured_outputs": (None,)},
    "thinking_token_budget": (None,),
}
"""Values of each option that change no log-prob; vLLM computes log-probs at temperature 0 as at 1."""
