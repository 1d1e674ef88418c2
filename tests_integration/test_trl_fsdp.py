"""A real client: TRL over two processes with FSDP2, FP32 shards and BF16 passes, on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

RANKS, SMALL = 2, 1e-6
"""Processes, and a learning rate that BF16 weights lose."""
SAMPLER = {"top_p": 0.9, "temperature": 0.7}
"""FSDP2 casts floating-point arguments of a model, which the smallest kept logits must not suffer."""


def shard_on_a_cpu(rank: int, folder: Path) -> None:
    """Join the group of processes, and let accelerate shard there, which it does on GPUs alone."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ["ACCELERATE_USE_CPU"] = "true"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    begin = AcceleratorState.__init__

    def begun(self: Any, *args: Any, **options: Any) -> None:
        if not self._shared_state:
            PartialState()._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        begin(self, *args, **options)

    AcceleratorState.__init__ = begun
    # They are in the folder.
    LlamaForCausalLM.save_pretrained = PreTrainedTokenizerFast.save_pretrained = lambda *_: None


def refusals(trainer: Any) -> None:
    """Check the errors for settings beside FSDP2; the engine is a stand-in that has a dtype."""
    from rl_kernels.models.clients import trl

    cast = {"invariant": True, "compute_dtype": torch.bfloat16}
    # accelerate's own policy for bf16=True.
    with pytest.raises(ValueError, match=r"^compute_dtype: expected torch\.bfloat16 with invariant, FSDP2"):
        trl.use_in(trainer, invariant=True)
    trainer.ref_model = trainer.model
    with pytest.raises(ValueError, match=r"^beta: expected 0 with compute_dtype and FSDP2"):
        trl.use_in(trainer, **cast)
    model = SimpleNamespace(dtype=torch.float16, logprobs_mode="processed_logprobs")
    config = SimpleNamespace(model_config=model, additional_config={"rl_kernels": True})
    engine = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    trainer.ref_model, trainer.use_vllm, trainer.vllm_mode = None, True, "colocate"
    trainer.vllm_generation = SimpleNamespace(llm=engine)
    with pytest.raises(ValueError, match=r"^dtype: expected float16 as in vLLM's engine, the trainer's .* bfloat16"):
        trl.use_in(trainer, record=False, **cast)
    trainer.use_vllm = False


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Return the FP32 weights, gathered from all processes, as TRL sends them to vLLM."""
    return {name: value.full_tensor().detach().clone() for name, value in model.named_parameters()}


def alone(folder: Path, weights: dict[str, torch.Tensor], inputs: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the log-probs of one process whose model has the weights, as an engine loads them."""
    from transformers import LlamaForCausalLM

    from rl_kernels.models import head_logp, invariant
    from rl_kernels.models.clients.trl.kept import IN_BATCH

    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    for name, value in model.named_parameters():
        value.data.copy_(weights[name])
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), invariant(model, strict=True):
        hidden = model.model(ids, attention_mask=mask, position_ids=places).last_hidden_state
        first = inputs["prompt_ids"].shape[1]
        sampler = {"temperature": SAMPLER["temperature"], "min_logit": inputs[IN_BATCH], "validate": False}
        return head_logp(model.lm_head, hidden[:, first - 1 : -1], ids[:, first:], **sampler)


def trained(trainer: Any, folder: Path) -> dict[str, Any]:
    """Train; count tokens of the passes that differ from the rollout's, and from those of one process."""
    counts: dict[str, Any] = {"tokens": 0, "rollout": 0, "one process": 0, "one process in FP32": 0}
    score, loss_of, rows = trainer._get_per_token_logps_and_entropies, trainer._compute_loss, []
    produce = trainer._generate_and_score_completions
    begun: list[dict[str, torch.Tensor]] = []

    def scored(*args: Any, **options: Any) -> Any:
        result = score(*args, **options)
        rows.append(result[0].detach())
        return result

    def produced(*args: Any, **options: Any) -> Any:
        # Where TRL sends them.
        begun.append(whole(trainer.model))
        return produce(*args, **options)

    def loss(model: Any, inputs: Any) -> Any:
        result, mask = loss_of(model, inputs), inputs["completion_mask"].bool()
        others = {
            "rollout": inputs["sampling_per_token_logps"],
            "one process": alone(folder, begun[-1], inputs, torch.bfloat16),
            "one process in FP32": alone(folder, begun[-1], inputs, torch.float32),
        }
        counts["tokens"] += int(mask.sum())
        for name, other in others.items():
            counts[name] += int((rows[-1] != other)[mask].sum())
        return result

    trainer._get_per_token_logps_and_entropies, trainer._compute_loss = scored, loss
    trainer._generate_and_score_completions = produced
    trainer.train()
    moved = [int((begun[0][name] != value).sum()) for name, value in whole(trainer.model).items()]
    counts["moved"] = sum(moved) / sum(value.numel() for value in begun[0].values())
    gradients = {value.grad.dtype for value in trainer.model.parameters() if value.grad is not None}
    counts["dtypes"] = sorted({str(value.dtype) for value in trainer.model.parameters()} | set(map(str, gradients)))
    counts["furthest"] = [
        each["sampling/sampling_logp_difference/max"] for each in trainer.state.log_history if "reward" in each
    ]
    return counts


def run(rank: int, folder: Path) -> None:
    """Train as one of the processes, and save what was counted."""
    shard_on_a_cpu(rank, folder)
    from small_trainer import trainer_in

    from rl_kernels.models.clients import trl

    # One batch is used for several optimizer steps in the other tests.
    steps = {"num_iterations": 1, "gradient_checkpointing": True, "bf16": True, "learning_rate": SMALL}
    trainer = trainer_in(folder, fsdp=True, fsdp_config={"version": 2}, **steps, **SAMPLER)
    refusals(trainer)
    trl.use_in(trainer, invariant=True, compute_dtype=torch.bfloat16)
    torch.save(trained(trainer, folder), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_fp32_shards_move_and_no_log_prob_differs(trainer_of: Any, tmp_path: Path) -> None:
    trainer_of(tmp_path)
    torch.multiprocessing.spawn(run, (tmp_path,), nprocs=RANKS)
    for rank in range(RANKS):
        counts = torch.load(tmp_path / f"{rank}.pt")
        print(rank, counts)
        assert counts["tokens"] > 100
        assert counts["rollout"] == counts["one process"] == 0
        assert set(counts["furthest"]) == {0.0}
        # The count can fail.
        assert counts["one process in FP32"] > 0.9 * counts["tokens"]
        assert counts["moved"] > 0.9
        assert counts["dtypes"] == ["torch.float32"]
