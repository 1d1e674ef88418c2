"""vLLM's own engine with the plugin, on a CPU: log-probs of sampled tokens are those of a model under `invariant`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")
SCRIPT = Path(__file__).parent / "vllm_on_cpu.py"
PLATFORM = """
from vllm.platforms.cpu import CpuPlatform

class Plain(CpuPlatform):
    @classmethod
    def import_kernels(cls):
        pass

    @classmethod
    def check_and_update_config(cls, vllm_config):
        config = vllm_config.compilation_config
        mode, backend = config.mode, config.backend
        super().check_and_update_config(vllm_config)
        # With this backend for its pieces, the graph is split as on a GPU; a CPU has another mode by itself.
        if backend == "eager":
            config.mode, config.backend, config.compile_sizes = mode, backend, []

def named():
    return "plain_platform.Plain"
"""
"""A CPU without vLLM's library."""
SIZES = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 512},
    **{"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16"},
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OF_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
OF_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
OF_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
OF_GEMMA |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
OF_GEMMA2 = {**OF_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "rope_parameters": ROPE}
OF_LAYERS = {"sliding_attention": ROPE, "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}
OF_MIXTURES = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "rope_parameters": ROPE}
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **OF_GEMMA2},
    "gemma3": {
        **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
        **{**OF_GEMMA, "rope_parameters": OF_LAYERS},
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_parameters": ROPE},
    "llama3": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_parameters": OF_LLAMA3},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_parameters": ROPE},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_parameters": ROPE, "pad_token_id": 0},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_parameters": ROPE},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_parameters": ROPE},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {
        **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        **{**OF_MIXTURES, "num_local_experts": 8, "intermediate_size": 64},
    },
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", **OF_MIXTURES, "intermediate_size": 64},
    "qwen2_moe": {
        **{"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"},
        **{**OF_MIXTURES, "shared_expert_intermediate_size": 96},
    },
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **OF_MIXTURES},
}
DTYPES = ("bfloat16", "float16", "float32")


class Done(NamedTuple):
    """The end of a request: exit status, and what was printed."""

    status: int
    out: str
    err: str


def distribution(folder: Path, name: str, group: str, value: str) -> None:
    made = folder / f"{name}-0.1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n", encoding="utf-8")
    (made / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n", encoding="utf-8")


@contextmanager
def script(folder: Path, **environment: str) -> Iterator[Any]:
    """Yield a function that asks the script, which waits for requests, with more environment variables."""
    (folder / "plain_platform.py").write_text(PLATFORM, encoding="utf-8")
    distribution(folder, "plain", "vllm.platform_plugins", "plain_platform:named")
    own = {
        **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        **{"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1"},
        **{"VLLM_CACHE_ROOT": str(folder / "cache"), "RL_KERNELS_VLLM": "1"},
        **environment,
    }
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    own["PYTHONPATH"] = os.pathsep.join(paths)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(SCRIPT)], env={**os.environ, **own}, **pipes) as process:

        def on(model: str, dtype: str = "bfloat16", *options: str, **environment: str) -> Done:
            of = {**SIZES, **{**MODELS, **MIXTURES}[model]}
            (folder / "config.json").write_text(json.dumps(of), encoding="utf-8")
            request = {"folder": str(folder), "dtype": dtype, "options": options, "environment": environment}
            print(json.dumps(request), file=process.stdin, flush=True)
            # vLLM may print lines of its own.
            answers = iter(process.stdout.readline, "")
            return Done(**json.loads(next(line for line in answers if line.startswith('{"status"'))))

        yield on
        process.stdin.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a function that asks vLLM's first model runner."""
    with script(tmp_path_factory.mktemp("vllm")) as ask:
        yield ask


@pytest.fixture(scope="module")
def run_second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a function that asks vLLM's second model runner; Triton interprets its kernels."""
    pytest.importorskip("triton")
    # With an empty list of GPUs vLLM uses Triton although it has no driver.
    own = {"VLLM_USE_V2_MODEL_RUNNER": "1", "CUDA_VISIBLE_DEVICES": ""}
    with script(tmp_path_factory.mktemp("vllm"), **own) as ask:
        yield ask


@pytest.mark.parametrize(
    ("model", "dtype", "options"),
    [
        *((model, dtype, ()) for model in MODELS for dtype in DTYPES if (model[:5], dtype) != ("gemma", "float16")),
        ("llama", "bfloat16", ("--compiled", "--processed")),
        ("llama", "bfloat16", ("--kept",)),
        ("qwen3", "float32", ("--kept",)),
        ("gemma2", "bfloat16", ("--compiled",)),
        ("qwen3", "bfloat16", ("--masked",)),
        ("gemma2", "bfloat16", ("--masked",)),
        ("llama", "bfloat16", ("--prompts",)),
        ("mixtral", "bfloat16", ()),
        ("olmoe", "float32", ()),
        ("qwen2_moe", "bfloat16", ("--compiled",)),
        ("qwen3_moe", "bfloat16", ("--pieces",)),
    ],
)
def test_rollout_has_the_bits_of_training(run: Any, model: str, dtype: str, options: tuple[str, ...]) -> None:
    check(run(model, dtype, *options), options)


@pytest.mark.parametrize(
    ("model", "dtype", "options"),
    [
        ("qwen3_moe", "bfloat16", ("--prompts",)),
        ("qwen3", "float16", ("--processed",)),
        ("llama", "bfloat16", ("--kept",)),
        ("gemma2", "bfloat16", ("--masked",)),
    ],
)
def test_the_second_runners_rollout_has_them_too(
    run_second: Any, model: str, dtype: str, options: tuple[str, ...]
) -> None:
    check(run_second(model, dtype, *options), options)


def check(done: Done, options: tuple[str, ...]) -> None:
    """Check that no log-prob under `invariant` differs."""
    assert done.status == 0, done.err
    counts = json.loads(done.out.splitlines()[-1])
    assert counts["tokens"] == 48 + ("--prompts" in options) * 111
    assert counts["invariant"] == 0
    # The stock model has others, so that the count can fail.
    assert counts["stock"] > 0


@pytest.mark.parametrize("model", ["gemma2", "gemma3"])
def test_vllm_itself_refuses_gemma_in_fp16(run: Any, model: str) -> None:
    done = run(model, "float16")
    assert done.status == 1
    assert "does not support float16" in done.err


def test_a_mistaken_variable_is_refused(run: Any) -> None:
    done = run("llama", RL_KERNELS_VLLM="yes")
    assert done.status == 1
    assert "RL_KERNELS_VLLM: expected 0 or 1, got 'yes'" in done.err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("min_tokens", 3),
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
        for sampler in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}):
            check_request("processed_logprobs", SamplingParams(**how, **sampler))
        with pytest.raises(ValueError, match=f"{option}: expected .* and logprobs_mode='processed_logprobs', got"):
            check_request("processed_logprobs", params)


def test_requests_whose_smallest_kept_logit_has_no_place_are_refused() -> None:
    """And those that drop tokens of a model whose cap of logits has other bits in vLLM than in training."""
    from vllm import SamplingParams

    from rl_kernels.models.clients.vllm.refusals import check_request

    for name, value in {"top_p": 0.9, "top_k": 20, "min_p": 0.1}.items():
        with pytest.raises(ValueError, match=f"^{name}: expected .* of a model with a soft cap, got"):
            check_request("processed_logprobs", SamplingParams(logprobs=0, **{name: value}), 30.0)
    check_request("processed_logprobs", SamplingParams(logprobs=0, temperature=0.5), 30.0)
    asks = SamplingParams(logprobs=0, extra_args={"rl_kernels_min_logit": True}, flat_logprobs=True)
    with pytest.raises(ValueError, match=r"^flat_logprobs for rl_kernels_min_logit: expected False"):
        check_request("processed_logprobs", asks)
    with pytest.raises(ValueError, match=r"^logprobs_mode for rl_kernels_min_logit: expected 'processed_logprobs'"):
        check_request("raw_logprobs", asks)


def test_every_option_of_a_request_is_known() -> None:
    from vllm import SamplingParams

    from rl_kernels.models.clients.vllm.requests import PLAIN

    harmless = {
        *("n", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs", "prompt_logprobs"),
        *("logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        *("include_stop_str_in_output", "output_kind", "skip_clone", "output_text_buffer_length", "extra_args"),
        *("routed_experts_prompt_start", "skip_reading_prefix_cache", "repetition_detection", "stream_interval"),
        *("prompt_logprob_start", "prompt_logprob_token_ids", "trace_decode_token_ids"),
        # Of no effect without a configuration of the engine, which is refused.
        "watermarking",
    }
    names = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert set(PLAIN) <= names
    # Some have no name in older versions.
    assert names <= harmless | set(PLAIN)
