"""The smallest kept logit of each token, in the log-probabilities of a request that asks for it.

A ``SamplingParams`` with ``extra_args={"rl_kernels_min_logit": True}``, ``logprobs`` and top_k, top_p or min_p gets one
more entry a token, ``output.logprobs[i][-1].logprob``: the smallest ``logit / temperature`` that was kept, the
``min_logit`` of ``linear_logp``. Where no token was dropped there is none. The engine's process hands it on as a last
column with the id -1.
"""

from __future__ import annotations

from typing import Any

from vllm.logprobs import Logprob
from vllm.v1.engine.logprobs import LogprobsProcessor

from rl_kernels.models.clients.vllm.requests import MIN_LOGIT, MIN_LOGIT_ID

ASKS = "_rl_kernels_asks"
"""Attribute of a request's processor of log-probs: whether it asks for the smallest kept logit."""
LAST_RANK = 2**31 - 1
"""Rank of that entry: clients sort by rank."""

_original_from_new_request: Any = LogprobsProcessor.from_new_request.__func__
_original_update: Any = LogprobsProcessor._update_sample_logprobs


@classmethod  # type: ignore[misc]
def _from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
    result = _original_from_new_request(cls, tokenizer, request)
    setattr(result, ASKS, bool((request.sampling_params.extra_args or {}).get(MIN_LOGIT)))
    return result


def _update_sample_logprobs(self: Any, logprobs_lists: Any) -> None:
    """Take the column out before vLLM reads tokens; put its numbers into the log-probs of a request that asks."""
    ids, logprobs = logprobs_lists.logprob_token_ids, logprobs_lists.logprobs
    if not ids.size or ids[0, -1] != MIN_LOGIT_ID:
        _original_update(self, logprobs_lists)
        return
    begun = len(self.logprobs)
    _original_update(self, logprobs_lists._replace(logprob_token_ids=ids[:, :-1], logprobs=logprobs[:, :-1]))
    if getattr(self, ASKS, False):
        for place, smallest in enumerate(logprobs[:, -1].tolist(), begun):
            if smallest > -float("inf"):
                self.logprobs[place][MIN_LOGIT_ID] = Logprob(smallest, LAST_RANK, None)


def install() -> None:
    """Replace what makes log-probs of a request's output."""
    LogprobsProcessor.from_new_request = _from_new_request
    LogprobsProcessor._update_sample_logprobs = _update_sample_logprobs
