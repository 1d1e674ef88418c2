"""verl's FSDP2 with FP32 weights and BF16 passes: scores have the bits of the BF16 model, as rollouts in vLLM have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked import copied

pytest.importorskip("verl")
pytestmark = pytest.mark.filterwarnings("ignore")

from test_verl import batch_of, engine_of, model_of, patched  # noqa: E402

TOKENS = 14
"""Of the batch, those with one before them."""


def wrapped(family: str, folder: Path) -> Any:
    """Return a model that verl has patched and wrapped, as its FSDP engine does: one rank holds the whole shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from verl.utils.fsdp_utils import apply_fsdp2

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    model = patched(model_of(family))
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    options = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": precision, "reshard_after_forward": True}
    apply_fsdp2(model, {**options, "offload_policy": None}, {})
    return model


def scores(model: Any, *, packed: bool) -> list[torch.Tensor]:
    """Return the log-probabilities of each sequence, as verl's engine computes them under autocast."""
    batch, engine = batch_of(1.0, fused=True, packed=packed), engine_of(model)
    inputs, others = engine.prepare_model_inputs(batch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = model(**inputs, use_cache=False)
    found = engine.prepare_model_outputs(output, others, batch, None)["log_probs"].unbind()
    return [row[:-1] for row in found]


def expected(family: str) -> list[torch.Tensor]:
    """Return the log-probabilities of each sequence alone, by the BF16 model under ``invariant``."""
    from rl_kernels.models import head_logp, invariant
    from rl_kernels.models.logits import logit_options

    model = model_of(family)
    for parameter in model.parameters():
        # Not the frequencies of the rotary embedding.
        parameter.data = parameter.data.bfloat16()
    with torch.no_grad(), invariant(model, strict=True):
        rows = batch_of(1.0, fused=True, packed=True)["input_ids"].unbind()
        hidden = [model.base_model(ids[None]).last_hidden_state[0, :-1] for ids in rows]
        head, options = model.get_output_embeddings(), logit_options(model)
        return [head_logp(head, x, ids[1:], **options) for x, ids in zip(hidden, rows, strict=True)]


def differing(family: str, folder: Path) -> tuple[int, ...]:
    """Return how many tokens there are, and how many differ, packed and padded."""
    model, wanted = wrapped(family, folder), expected(family)
    found = [sum(map(len, wanted))]
    for packed in (True, False):
        pairs = zip(scores(model, packed=packed), wanted, strict=True)
        found.append(sum(int((row != own).sum()) for row, own in pairs))
    return tuple(found)


def test_passes_of_fsdp2_have_the_bits_of_the_bf16_model(tmp_path: Path) -> None:
    families = ("Llama", "Qwen2", "Gemma2", "Qwen3Moe")
    for variable, is_same in (("1", True), ("0", False)):
        for family in families:
            folder = tmp_path / (family + variable)
            folder.mkdir()

            def run(family: str = family, folder: Path = folder) -> int:
                print(*differing(family, folder))
                return 0

            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RL_KERNELS_VLLM", variable)
                done = copied(run, folder)
            assert done.returncode == 0, done.stderr
            tokens, *counts = map(int, done.stdout.splitlines()[-1].split())
            assert tokens == TOKENS
            # Without `invariant` they differ, so that the count can fail.
            assert (counts == [0, 0]) is is_same, (family, counts)
