"""A real client: TRL with vLLM's engine in its process, on a CPU; each setting holds, or is refused by name."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")
pytest.importorskip("triton")

from test_vllm import PLATFORM, distribution

SCRIPT = Path(__file__).parent / "trl_with_vllm.py"
REFUSED = {
    "TRL's defaults: FP32 weights": "dtype: expected bfloat16 .* call use_in(..., compute_dtype=torch.bfloat16)",
    "repetition_penalty=1.1": "repetition_penalty: expected 1.0",
    "top_p=0.9, num_iterations=2": "top_k, top_p, min_p: expected none of them with num_iterations 2",
    "top_p=0.9, with a server": "vllm_mode: expected 'colocate' with top_k, top_p or min_p",
    "RL_KERNELS_VLLM forgotten": "RL_KERNELS_VLLM: expected 1 before the trainer is made",
    "README's line, with vLLM": "use_vllm: .* RL_KERNELS_VLLM=1 .* use_in(trainer, invariant=True, record=False)",
}
"""Setting -> two parts of the error, one after the other."""
MIXTURE = "Qwen3-MoE, compute_dtype"
KEPT = "top_k=5, top_p=0.9, min_p=0.02"
TRAINED = (
    MIXTURE,
    KEPT,
    "FP32 weights, compute_dtype, 1e-6",
    "LoRA of FP32 weights, compute_dtype",
    "LoRA of BF16 weights",
)


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def rows_of(folder: Path) -> dict[str, Any]:
    """Run the script; return setting -> its answer."""
    (folder / "plain_platform.py").write_text(PLATFORM, encoding="utf-8")
    distribution(folder, "plain", "vllm.platform_plugins", "plain_platform:named")
    own = {
        **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        # The runner that a GPU has by default; with an empty list of GPUs vLLM uses Triton although it has no driver.
        **{"VLLM_USE_V2_MODEL_RUNNER": "1", "CUDA_VISIBLE_DEVICES": ""},
        **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1"},
        **{"VLLM_CACHE_ROOT": str(folder / "cache"), "RL_KERNELS_VLLM": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


# One test, because the settings share a process, whose imports take most of the time.
def test_each_setting_holds_or_is_refused(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    for setting, answer in rows.items():
        print(f"{setting:36} {answer}")
    for setting, parts in REFUSED.items():
        first, *more = parts.split(" .* ")
        assert rows[setting].startswith(first), setting
        assert all(part in rows[setting] for part in more), setting
    for setting in TRAINED:
        counts = rows[setting]
        assert counts["tokens"] > 150, setting
        assert counts["differ"] == 0, setting
        assert set(counts["furthest"]) == {0.0}, setting
        assert counts["moved"] > 0.98, setting
        if "LoRA" in setting:
            rewards = counts["rewards"]
            assert sum(rewards[8:]) / 8 > sum(rewards[:4]) / 4 + 0.3, setting
            # PEFT's own merge and unmerge would round them.
            assert counts["base"] == 0, setting
        assert counts["kept"] == (counts["tokens"] if setting == KEPT else 0), setting
    # A pass for each micro-batch, and none for old log-probs.
    assert rows[MIXTURE]["passes"] == rows[TRAINED[2]]["passes"] == 4 * 2
    # The count can fail: an adapter that stays apart in training has other bits than the merged weights in vLLM.
    apart = rows["LoRA as PEFT computes it"]
    assert apart["differ"] > 0.9 * apart["tokens"]
    assert min(apart["furthest"]) > 0
