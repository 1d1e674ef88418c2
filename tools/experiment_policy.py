"""The models of `experiment.py`, their small trainable state, and the ways to sample and to score."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from experiment_tasks import Characters, Chat
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig, StaticCache

from rl_kernels.models import checkpoints, head_logp, invariant, sequence_logp
from rl_kernels.models.head import inputs_of, unrounded
from rl_kernels.models.logits import logit_options
from rl_kernels.models.trace import chosen_experts

FP8 = torch.float8_e4m3fn
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "eos_token_id": 0}
CONFIGS = {
    "mixture": Qwen3MoeConfig(
        **{"vocab_size": 128, "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 8, "num_experts": 64},
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 128, "norm_topk_prob": True, **SMALL},
    ),
    "tiny": LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, **SMALL),
    "tiny-mixture": Qwen3MoeConfig(
        **{"vocab_size": 128, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2, "num_experts": 8},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, **SMALL},
    ),
}
"""Models with random weights and a vocabulary of characters; the tiny ones are for tests on a CPU."""
MODELS = (checkpoints.SMOLLM2, *CONFIGS)


class Arm(NamedTuple):
    """How an arm computes: whether its model runs under ``invariant``, and whether its sampler's weights are FP8."""

    aligned: bool = False
    rounded: bool = False


ARMS = {"stock": Arm(), "aligned": Arm(aligned=True), "fp8": Arm(rounded=True)}


def load(name: str, seed: int, device: torch.device) -> tuple[Any, Characters | Chat]:
    """Return a model in BF16 in eval mode, none of whose weights has a gradient, and its tokenizer."""
    if name == checkpoints.SMOLLM2:
        found = checkpoints.find(name)
        model, tokenizer = found.load(torch.bfloat16), Chat(found.tokenizer())
    else:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.bfloat16)
        tokenizer = Characters()
    return model.to(device).eval().requires_grad_(False), tokenizer


class Factors:
    """Weights W + B A of low rank, LoRA (arXiv 2106.09685), merged: the model holds them rounded to its dtype.

    A model of the sampler and the passes of training read the same 16-bit weights. The state that is trained is small:
    FP32 factors A ``[..., R, K]`` and B ``[..., N, R]`` of the weights ``[..., N, K]`` of all layers, experts included,
    but not of embeddings, head and norms. W + B A is computed again from W and the factors.
    """

    def __init__(self, model: nn.Module, rank: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = [weight for name, weight in model.named_parameters() if ".layers." in name and weight.ndim > 1]
        self._bases = [weight.detach().clone() for weight in self.weights]
        self.factors: list[nn.Parameter] = []
        for weight in self.weights:
            weight.requires_grad_(True)
            weight.grad_dtype = torch.float32  # type: ignore[attr-defined]
            *experts, rows, columns = weight.shape
            a = torch.randn(*experts, rank, columns, generator=generator) * columns**-0.5
            b = torch.zeros(*experts, rows, rank)
            self.factors += [nn.Parameter(value.to(weight.device)) for value in (a, b)]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Turn gradients of the weights into gradients of the factors."""
        for weight, (a, b) in zip(self.weights, self._pairs(), strict=True):
            assert weight.grad is not None
            a.grad, b.grad = b.mT @ weight.grad, weight.grad @ a.mT
            weight.grad = None

    @torch.no_grad()
    def merge(self) -> None:
        """Write the sums of weights and factors into the model, rounded once."""
        for weight, base, (a, b) in zip(self.weights, self._bases, self._pairs(), strict=True):
            weight.copy_(base.float() + b @ a)

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.factors[::2], self.factors[1::2], strict=True)


@torch.no_grad()
def round_weights(sampler: nn.Module, model: nn.Module) -> None:
    """Copy a model's weights into its sampler, those of the layers through FP8 with a scale for each output channel."""
    for (name, target), source in zip(sampler.named_parameters(), model.parameters(), strict=True):
        value = source.float()
        if ".layers." in name and value.ndim > 1:
            scale = value.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(FP8).max
            value = (value / scale).to(FP8).float() * scale
        target.copy_(value)


class Rollout(NamedTuple):
    """Prompts with completions ``[B, P + N]``, the sampler's log-probs ``[B, N]`` and experts ``[B, N, choices]``."""

    ids: torch.Tensor
    logps: torch.Tensor
    experts: torch.Tensor | None


@torch.no_grad()
def rollout(model: Any, arm: Arm, prompts: torch.Tensor, uniform: torch.Tensor) -> Rollout:
    """Sample completions token by token with a static cache, on a GPU in a CUDA graph, and record their log-probs.

    Another engine, such as vLLM, takes the place of this function.

    Args:
        model: the sampler.
        arm: how it computes.
        prompts: ``[B, P]``, all of one length.
        uniform: ``[B, N]``, FP32 in [0, 1): token i of a completion is where the cumulated probability passes it.

    Returns:
        the completions, each of N tokens; an end token does not end them.
    """
    new, head = uniform.shape[1], model.get_output_embeddings()
    ids = torch.cat((prompts, prompts.new_zeros(uniform.shape)), 1)
    logps = torch.zeros_like(uniform)
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1])
    place = torch.full((1, 1), prompts.shape[1], device=prompts.device)
    token = prompts[:, :1].clone()

    def choose(logits: torch.Tensor) -> None:
        scores = logits[:, -1].float().log_softmax(-1)
        sums, index = scores.exp().cumsum(-1), place[0] - prompts.shape[1]
        drawn = torch.searchsorted(sums, uniform.index_select(1, index) * sums[:, -1:], right=True)
        token.copy_(drawn.clamp(max=scores.shape[1] - 1))
        logps.index_copy_(1, index, scores.gather(1, token))
        ids.index_copy_(1, place[0], token)
        hidden.index_copy_(1, index, rows.pop()[:, None])

    def step() -> None:
        logits = model(token, position_ids=place, past_key_values=cache).logits
        place.add_(1)
        choose(logits)

    with (
        unrounded(head) if arm.aligned else nullcontext(),
        inputs_of(head, lambda x: x[:, -1].clone()) as rows,
        chosen_experts(model) as chosen,
    ):
        first = model(prompts, past_key_values=cache, logits_to_keep=1).logits
        hidden = rows[0].new_zeros(*uniform.shape, rows[0].shape[-1])
        choose(first)
        run = step
        for _ in range(new - 1):
            run()
            if token.is_cuda and run is step and not chosen:
                # The first step has compiled the kernels. A capture runs nothing.
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                run = graph.replay
    if arm.aligned:
        logps = head_logp(head, hidden, ids[:, -new:], **logit_options(model))
    # A pass of [B P], then passes of [B].
    experts = torch.stack([each.unflatten(0, (len(ids), -1))[:, -1] for each in chosen], 1) if chosen else None
    return Rollout(ids, logps, experts)


def score(model: Any, arm: Arm, ids: torch.Tensor, new: int) -> torch.Tensor:
    """Return the log-probs ``[B, N]`` of the last N tokens of ``ids[B, T]`` in a pass of training."""
    if arm.aligned:
        logps = sequence_logp(model, ids)
        assert isinstance(logps, torch.Tensor)
        return logps[:, -new:]
    logits = model(ids, use_cache=False, logits_to_keep=new + 1).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, -new:, None])[..., 0]


@torch.no_grad()
def scored(model: Any, arm: Arm, ids: torch.Tensor, new: int, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs ``[B, N]`` and experts ``[B, N, choices]`` of passes of training over so many rows each."""
    with chosen_experts(model) as chosen:
        logps = torch.cat([score(model, arm, part, new) for part in ids.split(rows)])
    if not chosen:
        return logps, None
    return logps, torch.cat([each.unflatten(0, (-1, ids.shape[1])) for each in chosen])[:, -new - 1 : -1]


@contextmanager
def computing(models: Sequence[nn.Module], arm: Arm) -> Iterator[None]:
    """Put models under ``invariant`` for a ``with`` block if an arm wants it."""
    handles = [invariant(model, strict=True) for model in models if arm.aligned]
    try:
        yield
    finally:
        for handle in handles:
            handle.undo()
