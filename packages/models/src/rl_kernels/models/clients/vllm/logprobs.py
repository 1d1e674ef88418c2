"""Logits and the log-probabilities of sampled tokens from one reading of the head, by ``linear_logits``.

Logits of a few rows come from a CUDA graph (``graphs``), since the host decides how fast few sequences decode.

vLLM computes logits of the sampled rows, samples, and then calls for log-probabilities of the sampled tokens. The
logits of the first of these are stored until the last one. Where only the sampled token's log-probability is asked for,
it and its rank are one launch, with both of vLLM's model runners; other tokens keep vLLM's own numbers. With a soft cap
of the logits, ``linear_logp`` reads the head once more for the sampled tokens, since its kernels compute the cap.

The first runner would compute the log-probabilities of the whole vocabulary before it samples. It gets a copy of the
logits in their place, since vLLM changes logits in place, and the log-softmax is computed only for requests that name
other tokens. Processed log-probabilities are computed as raw ones: for all requests that ``refusals`` accepts, they are
the same.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from rl_kernels.linear_logp import LinearLogits, linear_logp
from rl_kernels.models.clients.vllm.graphs import GraphedLogits
from rl_kernels.models.clients.vllm.refusals import PROCESSED, check, check_layers, refuse
from rl_kernels.models.clients.vllm.versions import SECOND_RUNNER, TOP_TOKENS
from rl_kernels.models.fused.scores import score_tokens

_steps = threading.local()
"""Has ``last``: the logits of a thread's engine, until its log-probabilities are computed."""


class CappedLogits(NamedTuple):
    """The logits ``[N, V]`` of a head with a soft cap, and the arguments of ``linear_logp`` for these rows."""

    logits: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float

    def logp(self, target_ids: torch.Tensor, *, validate: bool = True) -> torch.Tensor:
        """Return the log-probability ``[N]`` of a token for each row; reads the head once more."""
        return linear_logp(self.hidden, self.weight, target_ids, self.bias, softcap=self.softcap, validate=validate)


def _capped(
    logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float
) -> CappedLogits:
    # Tokens are sampled from these; linear_logp caps its own.
    return CappedLogits(logits.div(softcap).tanh_().mul_(softcap), hidden, weight, bias, softcap)


class Logits(LogitsProcessor):
    """Computes logits by ``linear_logits``, and stores its result for the log-probabilities."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Make the layer, once for each model; refuse what is not covered.

        Raises:
            ValueError: an option of vLLM or of the model is not covered; the message names it.
        """
        super().__init__(*args, **options)
        config = get_current_vllm_config()
        check(config)
        check_layers(config)
        refuse("logits_as_input", self.logits_as_input, False)
        refuse("logit_scale", self.scale, 1.0)
        self._logits = GraphedLogits()

    def forward(
        self,
        lm_head: Any,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> torch.Tensor | None:
        """Return the logits ``[N, V]`` of the rows ``hidden_states[N, D]``, FP32; there is one rank to gather from."""
        # Two steps' logits would be in memory at once.
        _steps.last = None
        vocab, weight, bias = self.org_vocab_size, lm_head.weight, embedding_bias
        # A view takes host time in each step.
        if weight.shape[0] != vocab:
            weight, bias = weight[:vocab], None if bias is None else bias[:vocab]
        last: LinearLogits | CappedLogits = self._logits(hidden_states, weight, bias)
        if self.soft_cap is not None:
            last = _capped(last.logits, hidden_states, weight, bias, self.soft_cap)
        _steps.last = last
        return last.logits


def _last(rows: int) -> LinearLogits | CappedLogits:
    """Return the logits of the last step.

    Raises:
        RuntimeError: there was no step, or the last logits were of another number of rows.
    """
    last: LinearLogits | CappedLogits | None = getattr(_steps, "last", None)
    if last is None or len(last.logits) != rows:
        got = "none" if last is None else f"those of {len(last.logits)} rows"
        raise RuntimeError(f"log-probabilities of {rows} rows were asked for, the last logits are {got}")
    return last


def scores(token_ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability ``[N]`` of a token for each row of the last step, FP32.

    Raises:
        RuntimeError: there was no step, or the last logits were of another number of rows.
    """
    return _last(len(token_ids)).logp(token_ids, validate=False)


def _own(last: LinearLogits | CappedLogits, token_ids: torch.Tensor, dtype: torch.dtype) -> LogprobsTensors:
    """Return the log-probability of a token for each row and its rank, with the ids in a dtype."""
    norm = last.norm if isinstance(last, LinearLogits) else None
    logps, ranks = score_tokens(last.logits, norm, token_ids)
    if logps is None:
        logps = last.logp(token_ids, validate=False)
    return LogprobsTensors(token_ids.to(dtype).unsqueeze(1), logps.unsqueeze(1), ranks)


def _with_scores(result: Any, token_ids: torch.Tensor) -> Any:
    """Return vLLM's log-probabilities with ours in every column that has the row's token; -inf is padding."""
    is_own = (result.logprob_token_ids == token_ids[:, None]) & (result.logprobs > -torch.inf)
    return result._replace(logprobs=torch.where(is_own, scores(token_ids)[:, None], result.logprobs))


def _sampler(self: Sampler, logprobs_mode: str = "raw_logprobs", *args: Any, **options: Any) -> None:
    """Make the first runner's sampler, which computes processed log-probabilities as raw ones."""
    _sampler_init(self, "raw_logprobs" if logprobs_mode == PROCESSED else logprobs_mode, *args, **options)


def _copied(logits: torch.Tensor) -> torch.Tensor:
    """Store a copy of the logits, and return the copy in place of their log-probabilities."""
    copy = logits.clone()
    _steps.last = _last(len(logits))._replace(logits=copy)
    return copy


def _over_vocabulary(logprobs: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the whole vocabulary, given the result of ``_copied``."""
    return logprobs.log_softmax(-1) if logprobs is _last(len(logprobs)).logits else logprobs


def _gathered(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
    """Return the log-probabilities of each row's token and of its most probable tokens, and the token's rank."""
    result = own = _own(_last(len(token_ids)), token_ids, torch.int32)
    if num_logprobs:
        result = _with_scores(_originals["gathered"](_over_vocabulary(logprobs), num_logprobs, token_ids), token_ids)
        result = result._replace(selected_token_ranks=own.selected_token_ranks)
    # Not read again; logits of a long prompt are large.
    _steps.last = None
    return result


def _named_tokens(
    self: Sampler, logprobs: torch.Tensor, logprob_token_ids: dict[int, list[int]], sampled: torch.Tensor
) -> Any:
    """Return the log-probabilities of each row's sampled token and of the tokens that its request names."""
    result = _originals["named_tokens"](self, _over_vocabulary(logprobs), logprob_token_ids, sampled)
    return None if result is None else _with_scores(result, sampled)


def _top_tokens(
    logits: torch.Tensor,
    num_logprobs: int,
    sampled_token_ids: torch.Tensor,
    cu_num_logits: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Return the result of the second runner's function, with our log-probabilities of the sampled tokens."""
    if num_logprobs or cu_num_logits is not None or args or options.get("max_per_req_token_ids"):
        result = _originals["top_tokens"](logits, num_logprobs, sampled_token_ids, cu_num_logits, *args, **options)
        result = _with_scores(result, sampled_token_ids)
    else:
        result = _own(_last(len(sampled_token_ids)), sampled_token_ids, torch.int64)
    _steps.last = None
    return result


_sampler_init: Any = Sampler.__init__
_originals: dict[str, Any] = {
    "gathered": Sampler.gather_logprobs,
    "named_tokens": Sampler.gather_specific_token_logprobs,
    "top_tokens": getattr(SECOND_RUNNER[0], TOP_TOKENS),
}
"""vLLM's own functions, by the names of their replacements."""


def install() -> None:
    """Replace the processor of logits, and the log-probabilities of both of vLLM's runners."""
    LogitsProcessor.register_oot(Logits, name="LogitsProcessor")
    Sampler.__init__ = _sampler
    Sampler.compute_logprobs = staticmethod(_copied)
    Sampler.gather_logprobs = staticmethod(_gathered)
    Sampler.gather_specific_token_logprobs = _named_tokens
    for module in SECOND_RUNNER:
        setattr(module, TOP_TOKENS, _top_tokens)
