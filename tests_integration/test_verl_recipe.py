"""The configuration of verl's recipe, composed as printed: verl accepts it, and what breaks the bits is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, blocks

pytest.importorskip("verl")
pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from hydra import compose, initialize_config_dir
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils import config as verl_config

from rl_kernels.models.clients.verl import settings  # noqa: E402

PAGE = ROOT / "docs" / "recipes" / "verl.md"
OWN = ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "actor_rollout_ref.actor.use_dynamic_bsz=True")
"""What a run adds, beside its model and data."""
DEFAULTS = {"tensor_model_parallel_size": 2, "logprobs_mode": "processed_logprobs"}
"""verl's own values that the plugin does not take."""


def composed(folder: Path, *overrides: str) -> Any:
    """Return the configuration of the page, composed by Hydra with more settings."""
    (text,) = blocks(PAGE, "yaml")
    (folder / "aligned.yaml").write_text(text, encoding="utf-8")
    with initialize_config_dir(str(folder), version_base=None):
        return compose("aligned", [*OWN, *overrides])


def validated(config: Any) -> None:
    """Run verl's own validation, as ``main_ppo`` does before it starts Ray."""
    policy, critic = need_reference_policy(config), need_critic(config)
    verl_config.validate_config(config=config, use_reference_policy=policy, use_critic=critic)


def test_the_file_is_valid_as_printed(tmp_path: Path) -> None:
    config = composed(tmp_path, "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B")
    assert settings.is_wanted(config)
    validated(config)


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        *((f"rollout.{name}={value}", "set it to 1|logprobs_mode=raw_logprobs") for name, value in DEFAULTS.items()),
        ("rollout.pipeline_model_parallel_size=2", "set it to 1"),
        ("rollout.expert_parallel_size=2", "set it to 1"),
        *((f"rollout.temperature={value}", "set it to 1.0") for value in (0.7, 0)),
        ("rollout.top_p=0.9", "set it to 1.0"),
        ("rollout.top_k=20", "set it to 0"),
        ("rollout.logprobs_mode=processed_logits", "set it to raw_logprobs"),
        ("rollout.name=sglang", "set it to vllm"),
        ("rollout.quantization=fp8", "leave it unset"),
        ("model.lora_rank=8", "set it to 0"),
        ("model.lora.rank=8", "set it to 0"),
        ("model.use_fused_kernels=False", "set it to True"),
        ("model.fused_kernel_options.impl_backend=triton", "impl_backend=torch"),
        ("actor.fsdp_config.ulysses_sequence_parallel_size=2", "set it to 1"),
        ("actor.strategy=veomni", "set it to fsdp2"),
    ],
)
def test_settings_that_break_the_bits_are_refused_by_name(override: str, remedy: str, tmp_path: Path) -> None:
    config = composed(tmp_path, f"actor_rollout_ref.{override}")
    name = override.partition("=")[0].rpartition(".")[0 if "impl_backend" in override else 2]
    name = "val_kwargs.temperature" if override == "rollout.logprobs_mode=processed_logprobs" else name
    name = "use_fused_kernels" if "impl_backend" in override else name
    with pytest.raises(ValueError, match=rf"^actor_rollout_ref\..*{name}: got .* with RL_KERNELS_VLLM=1; .*({remedy})"):
        validated(config)


def test_without_the_variable_all_stays_verls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = 'ray_kwargs.ray_init.runtime_env.env_vars.RL_KERNELS_VLLM="0"'
    given = [off, "actor_rollout_ref.rollout.temperature=0.7", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    config = composed(tmp_path, *given)
    validated(config)
    monkeypatch.setenv("RL_KERNELS_VLLM", "1")
    with pytest.raises(ValueError, match="tensor_model_parallel_size"):
        validated(config)


def test_the_command_refuses_before_ray_starts(tmp_path: Path) -> None:
    composed(tmp_path)
    (command,) = [block for block in blocks(PAGE, "bash") if "--config-name aligned" in block]
    model = "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B"
    assert command.count(model) == 1
    changed = command.replace(model, f"{model} actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    options = {"cwd": tmp_path, "env": {**os.environ, "PATH": path}, "capture_output": True, "text": True}
    done = subprocess.run(["bash", "-c", changed], check=False, **options)
    assert done.returncode
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size: got 2 with RL_KERNELS_VLLM=1; set it" in done.stderr
    assert "ray init" not in done.stdout
