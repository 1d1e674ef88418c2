"""Options of a request that leave processed log-probs equal to the model's, and names. Does not import vLLM."""

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
DROPPING = ("top_p", "top_k", "min_p")
"""Options that keep the tokens with the largest logits: processed log-probs are over these."""
SAMPLED = ("temperature", *DROPPING)
"""Options that processed log-probs follow."""
MIN_LOGIT = "rl_kernels_min_logit"
"""Key of a request's ``extra_args``: with True, log-probs of tokens have the smallest kept ``logit / temperature``."""
MIN_LOGIT_ID = -1
"""The token id under which each position's log-probs have it, where tokens were dropped."""
