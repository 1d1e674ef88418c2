"""Experts over ranks in whole models, within FSDP2: logits and experts' gradients have the bits of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rl_kernels.core.testing.ranks import run_ranks
from rl_kernels.models import invariant
from rl_kernels.models.data_parallel import clip_grad_norm, ordered_gradients
from rl_kernels.models.parallel import parallelize_experts

pytest.importorskip("transformers")
FAMILIES, LENGTHS, STEPS = ("Qwen3Moe", "GptOss"), (7, 4), 2


def made(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    chosen = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **chosen)
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(97, (1, LENGTHS[rank]), generator=torch.Generator().manual_seed(rank))


def experts_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if ".experts." in name}


def upstream(rank: int) -> torch.Tensor:
    return torch.randn(1, LENGTHS[rank], 97, generator=torch.Generator().manual_seed(9 + rank))


def alone(model: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Return the logits of each rank's tokens, and experts' gradients of one padded batch, in one process."""
    invariant(model)
    width = max(LENGTHS)
    ids, mask, grad = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width), torch.zeros(2, width, 97)
    for rank, length in enumerate(LENGTHS):
        ids[rank, :length], mask[rank, :length], grad[rank, :length] = tokens(rank), 1, upstream(rank)
    logits = model(input_ids=ids, attention_mask=mask).logits
    logits.backward(grad.to(logits.dtype))
    grads = {name: value.grad for name, value in experts_of(model).items()}
    norm = clip_grad_norm(experts_of(model).values(), 1e9)
    return [logits[rank, :length].detach() for rank, length in enumerate(LENGTHS)], grads, norm


def over_ranks(rank: int) -> list[Any]:
    failed: list[Any] = []
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    for family in FAMILIES:
        logits, grads, norm = alone(made(family))
        model = made(family)
        invariant(model)
        cut = parallelize_experts(model, mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, ignored_params=set(cut))
        ordered_gradients(fully_shard(model, mesh=mesh, ignored_params=set(cut)))
        assert len(cut) == len(grads)
        for _ in range(STEPS):
            model.zero_grad()
            out = model(input_ids=tokens(rank)).logits
            out.backward(upstream(rank).to(out.dtype))
            failed += [] if torch.equal(out[0].detach(), logits[rank]) else [(family, "logits")]
        for name, value in experts_of(model).items():
            assert isinstance(value, DTensor)
            failed += [] if torch.equal(value.grad.full_tensor(), grads[name]) else [(family, name)]
        failed += [] if torch.equal(clip_grad_norm(experts_of(model).values(), 1e9), norm) else [(family, "norm")]
        # A copy runs on the same ranks.
        twin = made(family)
        invariant(twin)
        parallelize_experts(twin, distributed.group.WORLD)
        copied = copy.deepcopy(twin)(input_ids=tokens(rank)).logits
        failed += [] if torch.equal(copied[0].detach(), logits[rank]) else [(family, "copy")]
    return [failed, errors(rank)]


def errors(rank: int) -> list[str]:
    texts = []

    def attempt(model: nn.Module, swapped: bool = True) -> None:
        if swapped:
            invariant(model)
        try:
            parallelize_experts(model, distributed.group.WORLD)
        except (TypeError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")

    attempt(nn.Linear(2, 2))
    attempt(made("Qwen3Moe"), swapped=False)
    other = made("Qwen3Moe")
    with torch.no_grad():
        other.model.layers[0].mlp.experts.down_proj[rank] += 1
    attempt(other)
    odd = made("Qwen3Moe")
    odd.model.layers[1].mlp.experts.gate_up_proj = nn.Parameter(torch.zeros(7, 48, 32, dtype=torch.bfloat16))
    attempt(odd)
    return texts


def of_transformers(rank: int, folder: str) -> list[Any]:
    """Return what differs where transformers cuts and shards the model: logits, and experts' gradients, averages."""
    from transformers import Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    failed: list[Any] = []
    cut = DistributedConfig(fsdp_size=2, ep_size=2)
    model = Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=cut, dtype=torch.bfloat16)
    logits, grads, _ = alone(Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    stock = model(input_ids=tokens(rank)).logits
    with invariant(model, strict=True) as handle, invariant(model, strict=True):
        out = model(input_ids=tokens(rank)).logits
        out.backward(upstream(rank).to(out.dtype))
        failed += [] if torch.equal(out[0].detach(), logits[rank]) else ["logits"]
        for name, value in experts_of(model).items():
            assert isinstance(value.grad, DTensor)
            failed += [] if torch.equal(value.grad.full_tensor() * 2, grads[name]) else [name]
        handle.undo()
        failed += [] if torch.equal(model(input_ids=tokens(rank)).logits, out) else ["nested"]
    return failed if torch.equal(model(input_ids=tokens(rank)).logits, stock) else [*failed, "undone"]


def in_two_dims(rank: int) -> list[str]:
    """Experts over two ranks, sharded by FSDP2 over the other two; both pairs have the same tokens."""
    mesh, every = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")), init_device_mesh("cpu", (4,))
    own = rank % 2
    logits, grads, _ = alone(made("Qwen3Moe"))
    model = made("Qwen3Moe")
    invariant(model)
    parallelize_experts(model, mesh["ep"])
    for layer in model.model.layers:
        sharded = fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(4.0)
        fully_shard(layer, mesh=every)
    out = fully_shard(model, mesh=every)(input_ids=tokens(own)).logits
    out.backward(upstream(own).to(out.dtype))
    failed = [] if torch.equal(out[0].detach(), logits[own]) else ["logits"]
    # Twice the tokens, and averages over four ranks.
    pairs = {name: value.grad.full_tensor() * 2 for name, value in experts_of(model).items()}
    return [*failed, *(name for name, grad in pairs.items() if not torch.equal(grad, grads[name]))]


def test_experts_sharded_over_another_dim() -> None:
    assert run_ranks(in_two_dims, 4) == [[]] * 4


def test_models_that_transformers_cuts(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    made("Qwen3Moe").save_pretrained(tmp_path)
    assert run_ranks(of_transformers, 2, str(tmp_path)) == [[], []]


def test_experts_that_are_cut_in_another_way_are_left_alone() -> None:
    model = made("Qwen3Moe")
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts .*spreads its experts over ranks in an unknown way"):
        invariant(model, strict=True)


def test_experts_over_ranks() -> None:
    for failed, texts in run_ranks(over_ranks, 2):
        assert failed == []
        assert (
            texts[0] == "ValueError: model: expected a mixture of experts of transformers (on rank 0 of process_group)"
        )
        assert texts[1].startswith("TypeError: model: expected experts that invariant(model) swapped, model.layers.0.")
        assert texts[2].startswith("ValueError: weights of experts: expected the same on every rank")
        assert texts[3].startswith("ValueError: mesh: expected ranks that divide 7 experts of model.layers.1.mlp")
        assert len(texts) == 4
