"""Models whose sequences are cut over ranks: log-probs have the bits of one process, gradients are sums over tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import distributed, nn

from rl_kernels.attention import cut_context
from rl_kernels.core.testing.ranks import run_ranks
from rl_kernels.models import head_logp, invariant
from rl_kernels.models.parallel import parallelize, parallelize_context

pytest.importorskip("transformers")
FAMILIES, LENGTH = ("Llama", "Qwen3", "GptOss", "Gemma2"), 54


def made(family: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    given = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "sliding_window": 9}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    chosen = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "GptOss" else {}
    config = getattr(transformers, f"{family}Config")(**{**given, **heads, **chosen, **sizes})
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)


def scored(model: Any, ids: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    hidden = model.model(input_ids=ids, position_ids=positions).last_hidden_state
    logps: torch.Tensor = head_logp(model.lm_head, hidden, targets)
    logps.sum().backward()
    return logps.detach()


def over_ranks(rank: int) -> list[Any]:
    failed, group = [], distributed.group.WORLD
    tokens = torch.randint(97, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    ids, targets, positions = tokens[:, :-1], tokens[:, 1:], torch.arange(LENGTH)[None]
    mine = [cut_context(x, group) for x in (ids, positions, targets)]
    for family in FAMILIES:
        alone, model = made(family), made(family)
        invariant(alone)
        invariant(model)
        parallelize_context(model, group)
        expected = scored(alone, ids, positions, targets)
        failed += [] if torch.equal(scored(model, *mine), cut_context(expected, group)) else [(family, "log-probs")]
        for name, value in model.named_parameters():
            grad = value.grad.float()
            distributed.all_reduce(grad)
            whole = alone.get_parameter(name).grad.float()
            # BF16 rounds each rank's part of a sum.
            close = (grad - whole).norm() <= 0.02 * whole.norm() + 1e-4
            failed += [] if close else [(family, name)]
        twin = copy.deepcopy(model)
        twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        twin.train()
        failed += [] if torch.equal(scored(twin, *mine), cut_context(expected, group)) else [(family, "copy")]
        logits = [m(input_ids=x, position_ids=y).logits for m, x, y in ((alone, ids, positions), (model, *mine[:2]))]
        failed += [] if torch.equal(cut_context(logits[0], group), logits[1]) else [(family, "logits")]
    return [failed, errors(mine)]


def errors(mine: list[torch.Tensor]) -> list[str]:
    texts = []

    def attempt(call: Any, *args: Any, **options: Any) -> None:
        try:
            call(*args, **options)
        except (TypeError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")

    group = distributed.group.WORLD
    model, (ids, positions, _) = made("Llama"), mine
    attempt(parallelize_context, nn.Linear(2, 2), group)
    attempt(parallelize_context, model, group)
    invariant(model)
    attempt(parallelize_context, model, "cp")
    parallelize_context(model, group)
    attempt(model, ids)
    attempt(model, ids, position_ids=torch.arange(ids.shape[1])[None])
    call = {"input_ids": ids, "position_ids": positions}
    for mask in (torch.ones_like(ids), torch.zeros(1, 1, *[ids.shape[1]] * 2, dtype=torch.bool), {}):
        attempt(model, **call, attention_mask=mask)
    attempt(model, **call, cu_seq_lens_q=torch.tensor([0, ids.numel()], dtype=torch.int32))
    attempt(model, **call, labels=ids)
    assert model(**call, labels=ids, shift_labels=ids).loss > 0
    attempt(model, position_ids=positions)
    attempt(model, ids, position_ids=positions, past_key_values=object())
    cut = made("Llama", hidden_size=128, intermediate_size=128, head_dim=64)
    parallelize(cut, group)
    attempt(parallelize_context, cut, group)
    recurrent = made("Qwen3Next", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    convolved = made("Lfm2", layer_types=["conv", "full_attention"])
    scaled = made("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    for other in (recurrent, convolved, scaled):
        invariant(other)
        attempt(parallelize_context, other, group)
    undone = made("Llama")
    with invariant(undone):
        parallelize_context(undone, group)
    attempt(undone, **call)
    return texts


EXPECTED = (
    "TypeError: model: expected a model of transformers",
    "TypeError: model: expected attention that invariant(model) swapped",
    "TypeError: mesh: expected a ProcessGroup",
    "ValueError: position_ids: expected cut_context",
    "ValueError: position_ids: expected cut_context",
    *["ValueError: attention_mask: expected None"] * 3,
    "ValueError: cu_seq_lens_q: expected None",
    "ValueError: labels: expected None",
    "ValueError: input_ids: expected this rank's tokens",
    "ValueError: past_key_values: expected None",
    "TypeError: model: expected whole weights",
    *["TypeError: model: expected attention in all layers"] * 2,
    "TypeError: model: expected a rotary embedding of positions alone",
    "ValueError: config: expected the attention of invariant(), got sdpa",
)


def test_a_sequence_over_ranks() -> None:
    for failed, texts in run_ranks(over_ranks, 2):
        assert failed == []
        assert [text[: len(start)] for text, start in zip(texts, EXPECTED, strict=True)] == list(EXPECTED)
