"""Logits and the log-probabilities of sampled tokens from one reading of the head, by ``linear_logits``.

Logits of a few rows come from a CUDA graph (``graphs``), since the host decides how fast few sequences decode.

vLLM computes logits of the sampled rows, samples, and then calls for log-probabilities of the sampled tokens. The
logits of the first of these are stored until the last one. Where only the sampled token's log-probability is asked for,
it and its rank are one launch, with both of vLLM's model runners; other tokens keep vLLM's own numbers. With a soft cap
of the logits, ``linear_logp`` reads the head once more for the sampled tokens, since its kernels compute the cap.

The first runner would compute the log-probabilities of the whole vocabulary before it samples. It gets a copy of the
logits in their place, since vLLM changes logits in place, and the log-softmax is computed only for requests that name
other tokens. Processed log-probabilities are computed as raw ones for requests of which they are the same. For rows
with another temperature or a filter ``linear_logp`` reads the head once more: vLLM's masked logits say what was kept,
and the smallest of these is handed on in a column of its own (``outputs``).
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

from rl_kernels.linear_logp import LinearLogits, linear_logp
from rl_kernels.models.clients.vllm.graphs import GraphedLogits
from rl_kernels.models.clients.vllm.refusals import PROCESSED, check, check_layers, refuse
from rl_kernels.models.clients.vllm.requests import MIN_LOGIT_ID
from rl_kernels.models.clients.vllm.versions import SECOND_RUNNER, TOP_TOKENS
from rl_kernels.models.fused.scores import score_tokens

GREEDY = 1e-5
"""vLLM takes lower temperatures for 0."""
_steps = threading.local()
"""Of a thread's engine, until its log-probabilities are computed: ``last``, the logits; ``head``, the arguments of
``linear_logp``; ``temperature`` ``[N]``, or None if all are 1; ``masked``, the first runner's logits after masks;
``rows``, the indices of rows with a temperature or a filter, or None if that is unknown."""
KEEPING = "processed_logits"
"""The mode in which the first runner's sampler returns logits after masks."""


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
        _steps.head, _steps.temperature, _steps.rows = (hidden_states, weight, bias), None, None
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


def _over_kept(masked: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability ``[N]`` of a token over what each row of ``masked[N, V]`` keeps, and the smallest z.

    z is the quotient of ``linear_logp``; vLLM's may have another last bit, and drops one of two equal logits. -inf
    where nothing is dropped.
    """
    last, temperature, (hidden, weight, bias) = _last(len(token_ids)), _steps.temperature, _steps.head
    if temperature is None:
        temperature = torch.ones_like(last.logits[:, 0])
    # With a cap the head would be read for the others, too.
    is_of_all = _steps.rows is None or isinstance(last, CappedLogits) or len(_steps.rows) == len(token_ids)
    rows = slice(None) if is_of_all else _steps.rows
    is_dropped = masked[rows] == -torch.inf
    least = (last.logits[rows] / temperature[rows, None]).masked_fill_(is_dropped, torch.inf).amin(-1)
    least = torch.where(is_dropped.any(-1), least, -torch.inf)
    options: dict[str, Any] = {"temperature": temperature[rows], "min_logit": least, "validate": False}
    options["softcap"] = getattr(last, "softcap", 0.0)
    logps = linear_logp(hidden[rows], weight, token_ids[rows], bias, **options)
    if isinstance(rows, slice):
        return logps, least
    every = last.logp(token_ids, validate=False)
    return every.index_copy_(0, rows, logps), torch.full_like(every, -torch.inf).index_copy_(0, rows, least)


def _with_scores(result: Any, token_ids: torch.Tensor, logps: torch.Tensor | None = None) -> Any:
    """Return vLLM's log-probabilities with ours in every column that has the row's token; -inf is padding."""
    logps = scores(token_ids) if logps is None else logps
    is_own = (result.logprob_token_ids == token_ids[:, None]) & (result.logprobs > -torch.inf)
    return result._replace(logprobs=torch.where(is_own, logps[:, None], result.logprobs))


def _with_smallest(result: Any, smallest: torch.Tensor) -> Any:
    """Append a column to log-probabilities, with an id of no token: the smallest kept logit of each row."""
    ids, logprobs = result.logprob_token_ids, result.logprobs
    column = torch.full_like(ids[:, :1], MIN_LOGIT_ID)
    columns = torch.cat((ids, column), 1), torch.cat((logprobs, smallest[:, None]), 1)
    return result._replace(logprob_token_ids=columns[0], logprobs=columns[1])


def _sampler(self: Sampler, logprobs_mode: str = "raw_logprobs", *args: Any, **options: Any) -> None:
    """Make the first runner's sampler, which returns its logits for processed log-probabilities."""
    _sampler_init(self, KEEPING if logprobs_mode == PROCESSED else logprobs_mode, *args, **options)


def _sample(self: Sampler, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **options: Any) -> Any:
    """Return the first runner's tokens, and logits for ``_gathered``: masked ones where that changes log-probs."""
    metadata = sampling_metadata
    wants_logprobs = metadata.max_num_logprobs is not None or metadata.logprob_token_ids
    if self.logprobs_mode != KEEPING or not wants_logprobs:
        return _originals["sample"](self, logits, metadata, *args, **options)
    copy = _copied(logits)
    sampled, _steps.masked = _originals["sample"](self, logits, metadata, *args, **options)
    # Some requests of a batch with min_p have one.
    has_min_p = any(getattr(each, "min_p_count", 0) for each in metadata.logitsprocs.argmax_invariant)
    changes = torch.full_like(logits[:, 0], has_min_p, dtype=torch.bool)
    if metadata.temperature is not None:
        _steps.temperature = torch.where(metadata.temperature < GREEDY, 1.0, metadata.temperature)
        changes |= _steps.temperature != 1
    for filtered, neutral in ((metadata.top_k, logits.shape[1]), (metadata.top_p, 1)):
        if filtered is not None:
            changes |= filtered < neutral
    _steps.rows = changes.nonzero()[:, 0]
    if not len(_steps.rows):
        _steps.masked = None
        return sampled, copy
    return sampled, _steps.masked


def _temperature(self: Any, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, idx_mapping_np: Any) -> None:
    """Divide the second runner's logits by the temperatures of their requests, and store these."""
    neutral = {"temperature": {0.0, 1.0}, "min_p": {0.0}, "top_p": {1.0}, "top_k": {self.vocab_size}}
    settings = {name: getattr(self, name).np[idx_mapping_np].tolist() for name in neutral}
    rows = [
        row for row in range(len(idx_mapping_np)) if any(settings[name][row] not in neutral[name] for name in neutral)
    ]
    # Without a sync: the host is ahead of the GPU.
    _steps.rows = torch.tensor(rows, dtype=torch.int64, device="cpu").to(logits.device, non_blocking=True)
    # That of vLLM 0.26 divides and masks the model's own logits in place.
    last = getattr(_steps, "last", None)
    if rows and last is not None and logits.data_ptr() == last.logits.data_ptr():
        _copied(logits)
    _originals["temperature"](self, logits, expanded_idx_mapping, idx_mapping_np)
    temperature = self.temperature.gpu[expanded_idx_mapping]
    _steps.temperature = torch.where(temperature == 0, 1.0, temperature)


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
    logps = smallest = None
    if logprobs is getattr(_steps, "masked", None):
        (logps, smallest), logprobs = _over_kept(logprobs, token_ids), logprobs.log_softmax(-1)
    if num_logprobs:
        result = _originals["gathered"](_over_vocabulary(logprobs), num_logprobs, token_ids)
        result = result._replace(selected_token_ranks=own.selected_token_ranks)
    if num_logprobs or logps is not None:
        result = _with_scores(result, token_ids, logps)
    # Not read again; logits of a long prompt are large.
    _steps.last = _steps.masked = None
    return result if smallest is None else _with_smallest(result, smallest)


def _named_tokens(
    self: Sampler, logprobs: torch.Tensor, logprob_token_ids: dict[int, list[int]], sampled: torch.Tensor
) -> Any:
    """Return the log-probabilities of each row's sampled token and of the tokens that its request names."""
    logps = smallest = None
    if logprobs is getattr(_steps, "masked", None):
        (logps, smallest), logprobs = _over_kept(logprobs, sampled), logprobs.log_softmax(-1)
    result = _originals["named_tokens"](self, _over_vocabulary(logprobs), logprob_token_ids, sampled)
    if result is None:
        return None
    result = _with_scores(result, sampled, logps)
    return result if smallest is None else _with_smallest(result, smallest)


def _top_tokens(
    logits: torch.Tensor,
    num_logprobs: int,
    sampled_token_ids: torch.Tensor,
    cu_num_logits: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Return the result of the second runner's function, with our log-probabilities of the sampled tokens."""
    logps = smallest = None
    if _is_masked(logits) and (_steps.rows is None or len(_steps.rows)):
        logps, smallest = _over_kept(logits, sampled_token_ids)
    if num_logprobs or cu_num_logits is not None or args or options.get("max_per_req_token_ids"):
        result = _originals["top_tokens"](logits, num_logprobs, sampled_token_ids, cu_num_logits, *args, **options)
        result = _with_scores(result, sampled_token_ids, logps)
    else:
        result = _own(_last(len(sampled_token_ids)), sampled_token_ids, torch.int64)
        result = result if logps is None else result._replace(logprobs=logps[:, None])
    _steps.last = None
    return result if smallest is None else _with_smallest(result, smallest)


def _is_masked(logits: torch.Tensor) -> bool:
    """Say whether logits are a copy that the second runner has processed, not those of the last step."""
    last = getattr(_steps, "last", None)
    return last is not None and logits.data_ptr() != last.logits.data_ptr()


_sampler_init: Any = Sampler.__init__
_originals: dict[str, Any] = {
    "gathered": Sampler.gather_logprobs,
    "named_tokens": Sampler.gather_specific_token_logprobs,
    "top_tokens": getattr(SECOND_RUNNER[0], TOP_TOKENS),
    "sample": Sampler.sample,
    "temperature": SamplingStates.apply_temperature,
}
"""vLLM's own functions, by the names of their replacements."""


def install() -> None:
    """Replace the processor of logits, and the log-probabilities of both of vLLM's runners."""
    LogitsProcessor.register_oot(Logits, name="LogitsProcessor")
    Sampler.__init__ = _sampler
    Sampler.sample = _sample
    SamplingStates.apply_temperature = _temperature
    Sampler.compute_logprobs = staticmethod(_copied)
    Sampler.gather_logprobs = staticmethod(_gathered)
    Sampler.gather_specific_token_logprobs = _named_tokens
    for module in SECOND_RUNNER:
        setattr(module, TOP_TOKENS, _top_tokens)
