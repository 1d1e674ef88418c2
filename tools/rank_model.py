"""The runs of whole models in `ranks.py`: training steps under TP and FSDP2, and GRPO with TP rollouts."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rank_calls import different
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rl_kernels.core.distributed import group_rank, group_size
from rl_kernels.grpo_loss import grpo_loss
from rl_kernels.models import head_logp
from rl_kernels.models.data_parallel import ordered_gradients
from rl_kernels.models.parallel import load_full_state_dict, parallelize

BATCH, LENGTH, STEPS = 4, 1024, 5
WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 128256}
"""The widths of Llama 3.1 8B."""
SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "vocab_size": 32000}
PROMPTS, SAMPLES, PROMPT, ANSWER, ROUNDS = 4, 8, 16, 48, 3
"""Sizes of the GRPO loop, of which each rank updates its part of the sequences."""


def llama(sizes: dict[str, int], layers: int = 4) -> Any:
    """Return a BF16 Llama with random weights, the same on each rank."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **sizes, num_hidden_layers=layers, num_key_value_heads=8, tie_word_embeddings=False, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def _ids(step: int, vocab: int, rows: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(step)).cuda()


def _fused(model: Any, ids: torch.Tensor) -> torch.Tensor:
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logp = head_logp(model.lm_head, hidden[:, :-1], ids[:, 1:], validate=False)
    assert isinstance(logp, torch.Tensor)
    return logp


def _stock(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return -torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")


def _sharded(model: Any, mesh: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.model, mesh=mesh)
    fully_shard(model.lm_head, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _cut(model: Any, mesh: Any) -> Any:
    styles = {
        "q_proj": ColwiseParallel,
        "k_proj": ColwiseParallel,
        "v_proj": ColwiseParallel,
        "o_proj": RowwiseParallel,
    }
    plan = {f"model.layers.*.self_attn.{name}": style() for name, style in styles.items()}
    plan |= {f"model.layers.*.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    plan |= {"model.layers.*.mlp.down_proj": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def training(group: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the time of each way's training steps, and the number of log-probs that differ from one GPU."""
    size = group_size(group)
    mesh = init_device_mesh("cuda", (size,), mesh_dim_names=("ranks",))
    both = init_device_mesh("cuda", (1, size), mesh_dim_names=("data", "tensor"))
    options = {"validate": False}

    def cut_and_sharded() -> Any:
        model = llama(WIDE)
        parallelize(model, both["tensor"], sequence_parallel=True, **options)
        return _sharded(model, both["data"])

    def ours(mesh: Any, **more: bool) -> Callable[[], Any]:
        def make() -> Any:
            model = llama(WIDE)
            parallelize(model, mesh, **options, **more)
            return model

        return make

    ways: dict[str, tuple[Callable[[], Any], Any, int]] = {
        "ours, one GPU": (ours(None), _fused, 1),
        "ours, TP": (ours(mesh), _fused, 1),
        "ours, TP + sequence": (ours(mesh, sequence_parallel=True), _fused, 1),
        "ours, TP in FSDP2": (cut_and_sharded, _fused, 1),
        "ours, FSDP2": (lambda: _sharded(ours(None)(), mesh), _fused, size),
        "stock, one GPU": (lambda: llama(WIDE), _stock, 1),
        "stock, TP": (lambda: _cut(llama(WIDE), mesh), _stock, 1),
        "stock, FSDP2": (lambda: _sharded(llama(WIDE), mesh), _stock, size),
    }
    expected: list[torch.Tensor] = []
    for name, (make, score, parts) in ways.items():
        logps, milliseconds, memory = _trained(make(), score, group, parts)
        if not expected:
            expected = logps
        differing = sum(different(a, b) for a, b in zip(logps, expected, strict=True)) if parts == 1 else None
        yield name, {"ms": milliseconds, "peak_gib": memory, "differing": differing}
        torch.cuda.empty_cache()


def _trained(model: Any, score: Any, group: Any, parts: int) -> tuple[list[torch.Tensor], float, float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    torch.cuda.reset_peak_memory_stats()
    logps_by_step, spent = [], []
    for step in range(STEPS):
        ids = _ids(step, WIDE["vocab_size"])
        if parts > 1:
            ids = ids.chunk(parts)[group_rank(group)]
        torch.cuda.synchronize()
        distributed.barrier()
        start = time.perf_counter()
        logps = score(model, ids)
        (-logps.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds = torch.tensor(time.perf_counter() - start, device="cuda")
        distributed.all_reduce(seconds, distributed.ReduceOp.MAX, group=group)
        spent.append(float(seconds))
        logps_by_step.append(logps.detach().flatten())
    # The first steps compile kernels.
    return logps_by_step, statistics.median(spent[2:]) * 1e3, torch.cuda.max_memory_allocated() / 2**30


def loop(group: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rounds of GRPO, with rollouts under TP and updates under FSDP2, and how many log-probs differ."""
    size, rank = group_size(group), group_rank(group)
    mesh = init_device_mesh("cuda", (size,), mesh_dim_names=("ranks",))
    actor, learner = llama(SMALL), llama(SMALL)
    parallelize(actor, mesh, validate=False)
    parallelize(learner)
    learner = _sharded(learner, mesh)
    ordered_gradients(learner)
    optimizer = torch.optim.SGD(learner.parameters(), lr=1e-2)
    for number in range(ROUNDS):
        load_full_state_dict(actor, {name: value.full_tensor() for name, value in learner.state_dict().items()})
        ids, old = _rollout(actor, number)
        rows = slice(rank * len(ids) // size, (rank + 1) * len(ids) // size)
        current = _fused(learner, ids[rows])[:, PROMPT - 1 :]
        differing = torch.tensor(different(current.detach(), old[rows]), device="cuda")
        distributed.all_reduce(differing, group=group)
        rewards = (ids[rows, PROMPT:] % 2).float().mean(1)
        mask = torch.ones_like(current, dtype=torch.bool)
        groups = {"samples_per_prompt": SAMPLES, "process_group": group}
        loss = grpo_loss(current, old[rows], None, rewards, mask, **groups).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield f"round {number}", {"tokens": old.numel(), "differing": int(differing)}


@torch.no_grad()
def _rollout(model: Any, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample answers, the same on each rank; return the tokens, and the log-probs of the sampled ones."""
    from transformers import DynamicCache

    generator = torch.Generator("cuda").manual_seed(number)
    ids = _ids(number, SMALL["vocab_size"], PROMPTS, PROMPT).repeat_interleave(SAMPLES, 0)
    cache, logps, fed = DynamicCache(), [], ids
    for _ in range(ANSWER):
        hidden = model.model(input_ids=fed, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        logits = model.lm_head(hidden).float()
        fed = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        logps.append(head_logp(model.lm_head, hidden, fed[:, 0], validate=False))
        ids = torch.cat((ids, fed), 1)
    return ids, torch.stack(logps, 1)
