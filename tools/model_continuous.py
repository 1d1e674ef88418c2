"""Prompts and answers in continuous batching: `model_ways.py` compares their bits, `model_step.py` times them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

ANSWER = 16
"""Tokens of each greedy answer."""
PAGE = 256
"""Default tokens of a page in transformers' cache."""
BATCH = 1024
"""Tokens of a timed batch."""


@torch.no_grad()
def answered(
    model: Any, prompt_ids: Sequence[torch.Tensor], states_of: Callable[[Any], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return prompts with their answers, and ``states_of(output)`` of all their tokens but the last.

    A batch has as many tokens as the longest prompt, so other prompts are split into chunks, next to tokens of answers.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = ContinuousBatchingConfig(
        max_batch_tokens=max(map(len, prompt_ids)),
        num_blocks=_pages(prompt_ids, ANSWER),
        # Every token must be computed, so that the hook sees it.
        allow_block_sharing=False,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    greedy = GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)
    states: dict[str, list[torch.Tensor]] = {str(place): [] for place in range(len(prompt_ids))}
    answers: dict[str, Any] = {}
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=settings) as manager:

        def keep(*hook_args: Any) -> None:
            requests = manager.batch_processor.inputs_and_outputs.requests_in_batch
            parts = states_of(hook_args[-1])[0].split([request.query_length for request in requests])
            for request, part in zip(requests, parts, strict=True):
                states[request.state.request_id].append(part.clone())

        hook = model.model.register_forward_hook(keep)
        for place, ids in enumerate(prompt_ids):
            manager.add_request(ids.tolist(), request_id=str(place))
        while len(answers) < len(prompt_ids):
            answer = manager.get_result(timeout=1)
            if answer is None and not manager.is_running():
                raise RuntimeError("continuous batching ended before all prompts were answered")
            if answer is not None and answer.error:
                raise RuntimeError(answer.error)
            if answer is not None and answer.is_finished():
                answers[answer.request_id] = answer.generated_tokens
        hook.remove()
    whole = [torch.cat((ids, ids.new_tensor(answers[str(place)]))) for place, ids in enumerate(prompt_ids)]
    return whole, [torch.cat(parts) for parts in states.values()]


def batched(model: Any, prompt_ids: Sequence[torch.Tensor], tokens: int) -> Callable[[], Any]:
    """Return a call of ``generate_batch`` for greedy answers of ``tokens``, with defaults except a cache that fits."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    greedy = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = ContinuousBatchingConfig(num_blocks=_pages(prompt_ids, tokens), max_batch_tokens=BATCH)
    ids = [prompt.tolist() for prompt in prompt_ids]

    def call() -> None:
        answers = model.generate_batch(ids, generation_config=greedy, continuous_batching_config=settings)
        answered = sum(len(answer.generated_tokens) for answer in answers.values())
        if answered != tokens * len(ids):
            raise RuntimeError(f"generate_batch gave {answered} of {tokens * len(ids)} tokens")

    return call


def _pages(prompt_ids: Sequence[torch.Tensor], tokens: int) -> int:
    return sum((len(ids) + tokens) // PAGE + 1 for ids in prompt_ids)
