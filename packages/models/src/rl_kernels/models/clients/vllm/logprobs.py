"""Logits and the log-probabilities of sampled tokens from one reading of the head, by ``linear_logits``.

vLLM makes logits of the sampled rows, samples, and then asks for log-probabilities of the sampled tokens. What these
are made from is kept from the first to the last of these steps; vLLM samples from a copy of the logits, in FP32. The
most probable tokens, if they are asked for too, keep vLLM's own numbers.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.sample.sampler import Sampler

from rl_kernels.linear_logp import LinearLogits, linear_logits
from rl_kernels.models.clients.vllm.refusals import check, refuse

_steps = threading.local()
"""``last``: of the last step of a thread's engine."""


class Logits(LogitsProcessor):
    """Keeps what the log-probabilities of its logits are made from."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Make the layer, once for each model; refuse what is not covered.

        Raises:
            ValueError: an option of vLLM or of the model is not covered; the message names it.
        """
        super().__init__(*args, **options)
        check(get_current_vllm_config())
        refuse("logits_as_input", self.logits_as_input, False)
        refuse("logit_scale", self.scale, 1.0)
        refuse("final_logit_softcapping", self.soft_cap)

    def forward(
        self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the logits ``[N, V]`` of the rows ``hidden_states[N, D]``, FP32."""
        vocab = self.org_vocab_size
        bias = None if embedding_bias is None else embedding_bias[:vocab]
        _steps.last = linear_logits(hidden_states, lm_head.weight[:vocab], bias)
        # vLLM divides by the temperature in place.
        return _steps.last.logits.clone()


def scores(token_ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability ``[N]`` of a token for each row of the last step, FP32.

    Raises:
        RuntimeError: there was no step.
        ValueError: the last logits were of another number of rows.
    """
    last: LinearLogits | None = getattr(_steps, "last", None)
    if last is None:
        raise RuntimeError("log-probabilities were asked for before any logits")
    return last.logp(token_ids, validate=False)


def _gathered(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
    return _with_scores(_of_first_runner(logprobs, num_logprobs, token_ids), token_ids)


def _of_top(logits: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
    return _with_scores(_of_second_runner(logits, num_logprobs, token_ids, *args, **options), token_ids)


def _of_chosen(self: Sampler, logprobs: torch.Tensor, chosen: dict[int, list[int]], sampled: torch.Tensor) -> Any:
    found = _of_tokens(self, logprobs, chosen, sampled)
    return None if found is None else _with_scores(found, sampled)


def _with_scores(found: Any, token_ids: torch.Tensor) -> Any:
    """Return vLLM's log-probabilities with ours for the token of each row, wherever it is named; -inf is padding."""
    if found.logprobs.shape[1] == 1:
        # The token of the row alone: fewer launches.
        return found._replace(logprobs=scores(token_ids)[:, None])
    is_own = (found.logprob_token_ids == token_ids[:, None]) & (found.logprobs > -torch.inf)
    return found._replace(logprobs=torch.where(is_own, scores(token_ids)[:, None], found.logprobs))


_of_first_runner: Any = Sampler.gather_logprobs
_of_tokens: Any = Sampler.gather_specific_token_logprobs
_of_second_runner: Any = None


def install() -> None:
    """Replace the processor of logits, and the log-probabilities of both of vLLM's runners."""
    global _of_second_runner
    from vllm.v1.worker.gpu.sample import sampler

    LogitsProcessor.register_oot(Logits, name="LogitsProcessor")
    Sampler.gather_logprobs = staticmethod(_gathered)
    Sampler.gather_specific_token_logprobs = _of_chosen
    if sampler.compute_topk_logprobs is not _of_top:
        _of_second_runner, sampler.compute_topk_logprobs = sampler.compute_topk_logprobs, _of_top
