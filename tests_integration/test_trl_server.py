"""A real client: TRL with `trl vllm-serve` in a process of its own, over HTTP, on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")
pytest.importorskip("uvicorn")
# TRL warns of vLLM after 0.31.
pytestmark = pytest.mark.filterwarnings("ignore")

from test_trl_vllm import free_port  # noqa: E402
from test_vllm import PLATFORM, distribution  # noqa: E402

HERE = Path(__file__).parent
START, LIMIT = 240, 240
"""Seconds until the server must answer, and until the training must end; they take 15 each."""


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of both processes; vLLM's plugins give what its compiled library would."""
    (folder / "plain_platform.py").write_text(PLATFORM, encoding="utf-8")
    distribution(folder, "plain", "vllm.platform_plugins", "plain_platform:named")
    distribution(folder, "library", "vllm.general_plugins", "vllm_on_cpu:stand_in")
    paths = [str(folder), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        **{"VLLM_HOST_IP": "127.0.0.1", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CACHE_ROOT": str(folder / "cache")},
        **{"RL_KERNELS_VLLM": "1", "PYTHONPATH": os.pathsep.join(paths)},
    }
    return {**os.environ, **own}


def answers(url: str) -> bool:
    """Say whether a server is up."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@contextmanager
def served(folder: Path, own: dict[str, str]) -> Iterator[str]:
    """Yield the address of a server with the model in a folder; end it and its processes afterwards."""
    port, log = free_port(), folder / "server.log"
    url = f"http://127.0.0.1:{port}"
    words = ["--model", str(folder / "model"), "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "trl.scripts.vllm_serve", *words, "--enforce-eager"]
    with log.open("w") as out:
        # Its engine is a process of its own: a group, so that no process is left behind.
        options = {"stdout": out, "stderr": out, "start_new_session": True}
        process = subprocess.Popen(command, env=own, **options)
    try:
        end = time.monotonic() + START
        while not answers(url):
            is_starting = process.poll() is None and time.monotonic() < end
            assert is_starting, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_has_the_bits_of_training(trainer_of: Any, tmp_path: Path) -> None:
    from trl_with_vllm import SIZES

    trainer_of(tmp_path, sizes=SIZES)
    own = environment(tmp_path)
    with served(tmp_path, own) as url:
        command = [sys.executable, str(HERE / "trl_with_server.py"), str(tmp_path), url]
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    for setting, answer in rows.items():
        print(f"{setting:26} {answer}")
    forgotten = "RL_KERNELS_VLLM: expected 1 where the server starts, vLLM runs without the plugin"
    assert rows["RL_KERNELS_VLLM forgotten"] == forgotten
    assert rows["FP32 weights"].startswith("dtype: expected bfloat16 as in vLLM's engine, the trainer's model has")
    counts = rows["invariant"]
    assert counts["tokens"] > 150
    assert counts["differ"] == 0
    assert set(counts["furthest"]) == {0.0}
    # So no token could agree unless each step's weights reach the server.
    assert counts["moved"] > 0.98
    # The count can fail.
    assert rows["without invariant"]["differ"] > 0.5 * rows["without invariant"]["tokens"]
