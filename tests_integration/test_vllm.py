"""vLLM's own engine with the plugin, on a CPU: log-probs of sampled tokens are those of a model under `invariant`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
SCRIPT = Path(__file__).parent / "vllm_on_cpu.py"
PLATFORM = """
from vllm.platforms.cpu import CpuPlatform

class Plain(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return selected_backend.get_path()

    @classmethod
    def import_kernels(cls):
        pass

def named():
    return "plain_platform.Plain"
"""
"""A CPU without vLLM's library, on which a backend may be chosen."""
SIZES = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 512},
    **{"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16"},
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OF_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
OF_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_parameters": ROPE},
    "llama3": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_parameters": OF_LLAMA3},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_parameters": ROPE},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rope_parameters": ROPE},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_parameters": ROPE, "pad_token_id": 0},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_parameters": ROPE},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_parameters": ROPE},
}


def distribution(folder: Path, name: str, group: str, value: str) -> None:
    made = folder / f"{name}-0.1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n", encoding="utf-8")
    (made / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n", encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Return a function that runs the script on a model, with more environment variables."""
    (tmp_path / "plain_platform.py").write_text(PLATFORM, encoding="utf-8")
    distribution(tmp_path, "plain", "vllm.platform_plugins", "plain_platform:named")

    def on(model: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "config.json").write_text(json.dumps({**SIZES, **MODELS[model]}), encoding="utf-8")
        own = {
            **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
            **{"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1"},
            **{"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "RL_KERNELS_VLLM": "1", **environment},
        }
        paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path), *options],
            env={**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )

    return on


@pytest.mark.parametrize(
    ("model", "options"),
    [*((model, ()) for model in MODELS), ("llama", ("--compiled", "--processed"))],
    ids=[*MODELS, "compiled-processed"],
)
def test_rollout_has_the_bits_of_training(run: Any, model: str, options: tuple[str, ...]) -> None:
    done = run(model, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["tokens"] == 48
    assert counts["invariant"] == 0
    # The stock model has others, so that the count can fail.
    assert counts["stock"] > 0


def test_a_mistaken_variable_is_refused(run: Any) -> None:
    done = run("llama", RL_KERNELS_VLLM="yes")
    assert done.returncode != 0
    assert "RL_KERNELS_VLLM: expected 0 or 1, got 'yes'" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("temperature", 0.7), ("top_p", 0.9), ("top_k", 20), ("min_p", 0.1), ("min_tokens", 3)),
        *(("presence_penalty", 0.1), ("frequency_penalty", 0.1), ("repetition_penalty", 1.1)),
        *(("logit_bias", {3: 1.0}), ("allowed_token_ids", [1, 2]), ("bad_words", ["no"])),
        *(("structured_outputs", object()), ("thinking_token_budget", 3)),
    ],
)
def test_requests_whose_processed_log_probs_are_others_are_refused(option: str, value: object) -> None:
    from vllm import SamplingParams

    from rl_kernels.models.clients.vllm.refusals import check_request

    asked = ({"logprobs": 0}, {"logprob_token_ids": [1, 2]})
    check_request("processed_logprobs", SamplingParams(**{option: value}))
    for how in asked:
        params = SamplingParams(**how)
        # As another client may fill it in.
        setattr(params, option, value)
        check_request("raw_logprobs", params)
        for plain in ({}, {"temperature": 0.0}, {"top_k": -1}, {"seed": 3, "stop_token_ids": [2]}):
            check_request("processed_logprobs", SamplingParams(**how, **plain))
        with pytest.raises(ValueError, match=f"{option}: expected .* and logprobs_mode='processed_logprobs', got"):
            check_request("processed_logprobs", params)


def test_every_option_of_a_request_is_known() -> None:
    from vllm import SamplingParams

    from rl_kernels.models.clients.vllm.requests import PLAIN

    harmless = {
        *("n", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs", "prompt_logprobs"),
        *("logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        *("include_stop_str_in_output", "output_kind", "skip_clone", "output_text_buffer_length", "extra_args"),
        *("routed_experts_prompt_start", "skip_reading_prefix_cache", "repetition_detection"),
    }
    names = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert names == harmless | set(PLAIN)
