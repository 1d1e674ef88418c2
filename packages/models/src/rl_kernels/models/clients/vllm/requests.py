"""Options of a request with which processed log-probs are those of the model. Does not import vLLM."""

from __future__ import annotations

PROCESSED = "processed_logprobs"
"""Log-probs of what is sampled from, after temperature and masks; trainers ask vLLM for these."""
PLAIN: dict[str, tuple[object, ...]] = {
    **{"temperature": (1.0, 0.0), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "min_tokens": (0,)},
    **{"presence_penalty": (0.0,), "frequency_penalty": (0.0,), "repetition_penalty": (1.0,)},
    **{"logit_bias": (None, {}), "allowed_token_ids": (None,), "bad_words": (None, []), "structured_outputs": (None,)},
    "thinking_token_budget": (None,),
}
"""Values with which an option changes no log-prob; vLLM takes temperature 0 for 1 here."""
