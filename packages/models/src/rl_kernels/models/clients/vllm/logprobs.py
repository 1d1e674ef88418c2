"""Log-probabilities of sampled tokens from hidden states, by ``linear_logp``, as a trainer takes them.

vLLM makes logits of the sampled rows, samples, and then asks for log-probabilities of the sampled tokens. The rows are
kept from the first to the last of these steps. The most probable tokens, if they are asked for too, keep vLLM's own
numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.sample.sampler import Sampler

from rl_kernels.linear_logp import linear_logp
from rl_kernels.models.clients.vllm.refusals import check, refuse

_last: dict[str, Any] = {}
"""Of the last step: hidden states of the sampled rows, and the head."""


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

    def forward(
        self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the logits of the rows ``hidden_states[N, D]``."""
        _last.update(hidden=hidden_states, head=lm_head, bias=embedding_bias, of=self)
        return super().forward(lm_head, hidden_states, embedding_bias)


def scores(token_ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability ``[N]`` of a token for each row of the last step, FP32.

    Raises:
        RuntimeError: the last logits were of another number of rows.
    """
    hidden, made = _last["hidden"], _last["of"]
    if hidden.shape[0] != token_ids.shape[0]:
        raise RuntimeError(
            f"log-probabilities of {token_ids.shape[0]} tokens, but the last logits were {hidden.shape[0]} rows"
        )
    weight, bias = _last["head"].weight[: made.org_vocab_size], _last["bias"]
    return linear_logp(
        hidden,
        weight,
        token_ids.long(),
        None if bias is None else bias[: made.org_vocab_size],
        softcap=made.soft_cap or 0.0,
        logit_scale=made.scale,
        validate=False,
    )


def _gathered(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
    return _with_scores(_of_first_runner(logprobs, num_logprobs, token_ids), token_ids)


def _of_top(logits: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
    return _with_scores(_of_second_runner(logits, num_logprobs, token_ids, *args, **options), token_ids)


def _with_scores(found: Any, token_ids: torch.Tensor) -> Any:
    """Return vLLM's log-probabilities with ours for the token of each row, also where it is among the most probable."""
    is_own = found.logprob_token_ids == token_ids[:, None]
    return found._replace(logprobs=torch.where(is_own, scores(token_ids)[:, None], found.logprobs))


_of_first_runner: Any = Sampler.gather_logprobs
_of_second_runner: Any = None


def install() -> None:
    """Replace the processor of logits, and the log-probabilities of both of vLLM's runners."""
    global _of_second_runner
    from vllm.v1.worker.gpu.sample import sampler

    LogitsProcessor.register_oot(Logits, name="LogitsProcessor")
    Sampler.gather_logprobs = staticmethod(_gathered)
    if sampler.compute_topk_logprobs is not _of_top:
        _of_second_runner, sampler.compute_topk_logprobs = sampler.compute_topk_logprobs, _of_top
