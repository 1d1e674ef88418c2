"""Logits and the log-probabilities of sampled tokens from one reading of the head, by ``linear_logits``.

vLLM makes logits of the sampled rows, samples, and then asks for log-probabilities of the sampled tokens. What these
are made from is kept from the first to the last of these steps. vLLM changes logits in place, so a copy is kept:
made where the first runner would form the log-probabilities of the whole vocabulary, which are left out where only
sampled tokens are asked for. The most probable tokens, if they are asked for too, keep vLLM's own numbers.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
from vllm.v1.sample.sampler import Sampler

from rl_kernels.linear_logp import LinearLogits, linear_logits
from rl_kernels.models.clients.vllm.refusals import PROCESSED, check, refuse

FEW = 512
"""Rows up to which the comparison that counts a rank is stored: vLLM's compiled count takes more host time."""
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
        config = get_current_vllm_config()
        check(config)
        # The first runner asks for these after it has sampled.
        self._copies = config.model_config.logprobs_mode == PROCESSED
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
        return _steps.last.logits.clone() if self._copies else _steps.last.logits


def _last(rows: int) -> LinearLogits:
    """Return what the last step made.

    Raises:
        RuntimeError: there was no step, or the last logits were of another number of rows.
    """
    last: LinearLogits | None = getattr(_steps, "last", None)
    if last is None or len(last.norm) != rows:
        made = "none" if last is None else f"those of {len(last.norm)} rows"
        raise RuntimeError(f"log-probabilities of {rows} rows were asked for, the last logits are {made}")
    return last


def scores(token_ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability ``[N]`` of a token for each row of the last step, FP32.

    Raises:
        RuntimeError: there was no step, or the last logits were of another number of rows.
    """
    return _last(len(token_ids)).logp(token_ids, validate=False)


def _kept(logits: torch.Tensor) -> torch.Tensor:
    """Keep a copy of the logits, and return it in place of their log-probabilities."""
    _steps.last = _last(len(logits))._replace(logits=logits.clone())
    kept: torch.Tensor = _steps.last.logits
    return kept


def _of_all(logprobs: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the whole vocabulary."""
    return logprobs.log_softmax(-1) if logprobs is _steps.last.logits else logprobs


def _ranks(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return how many logits ``[N, V]`` of a row are at least the chosen one ``[N, 1]``."""
    if len(logits) <= FEW:
        return (logits >= chosen).sum(-1)
    for x in (logits, chosen):
        # As vLLM has it: one program for all numbers of rows.
        torch._dynamo.decorators.mark_unbacked(x, 0)
    counted: torch.Tensor = batched_count_greater_than(logits, chosen)
    return counted


def _gathered(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
    if num_logprobs:
        return _with_scores(_of_first_runner(_of_all(logprobs), num_logprobs, token_ids), token_ids)
    last, ids = _last(len(token_ids)), token_ids[:, None]
    chosen = last.logits.gather(1, ids)
    return LogprobsTensors(ids.to(torch.int32), last.logp_of(chosen), _ranks(last.logits, chosen))


def _of_top(logits: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
    return _with_scores(_of_second_runner(logits, num_logprobs, token_ids, *args, **options), token_ids)


def _of_chosen(self: Sampler, logprobs: torch.Tensor, chosen: dict[int, list[int]], sampled: torch.Tensor) -> Any:
    found = _of_tokens(self, _of_all(logprobs), chosen, sampled)
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
    Sampler.compute_logprobs = staticmethod(_kept)
    Sampler.gather_logprobs = staticmethod(_gathered)
    Sampler.gather_specific_token_logprobs = _of_chosen
    if sampler.compute_topk_logprobs is not _of_top:
        _of_second_runner, sampler.compute_topk_logprobs = sampler.compute_topk_logprobs, _of_top
