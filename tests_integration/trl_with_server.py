"""Train with TRL and a vLLM server, on a CPU; print what holds and what is refused, as JSON.

`python tests_integration/trl_with_server.py FOLDER URL`, in the environment that `test_trl_server.py` sets. TRL's
client pushes weights through NCCL, which a CPU lacks: here they go through a file that the server reads.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from small_trainer import trainer_in
from trl.generation.vllm_client import VLLMClient
from trl_with_vllm import ENGINE, SIZES, error_of, tell, trained


def push_by_file(folder: Path) -> None:
    """Let TRL's client push weights through a file."""
    folder.mkdir()
    shutil.copy(folder.parent / "model" / "config.json", folder)

    def push(self: Any, metadata: Any, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        save_file({name: value.detach().clone() for name, value in named}, folder / "model.safetensors")
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._post(f"{self.base_url}/collective_rpc", json=call)

    VLLMClient.init_communicator, VLLMClient.update_named_params = (lambda self, device=0: None), push


def without_plugin(trainer: Any) -> str:
    """Return the error of ``use_in`` where the server's configuration has no mark of the plugin."""
    from rl_kernels.models.clients import trl

    client = trainer.vllm_generation.vllm_client
    info = client.get_server_info()
    client.get_server_info = lambda: {**info, "additional_config": {}}
    message = error_of(trl.use_in, trainer, invariant=True, record=False, compute_dtype=torch.bfloat16)
    del client.get_server_info
    return message


def main(folder: Path, url: str) -> None:
    """Print the table."""
    from rl_kernels.models.clients import trl

    push_by_file(folder / "pushed")
    options = {**ENGINE, "vllm_mode": "server", "vllm_server_base_url": url, "learning_rate": 1e-2}
    trainer = trainer_in(folder / "ours", sizes=SIZES, **options)
    tell("RL_KERNELS_VLLM forgotten", without_plugin(trainer))
    tell("FP32 weights", error_of(trl.use_in, trainer, invariant=True, record=False))
    trl.use_in(trainer, invariant=True, record=False, compute_dtype=torch.bfloat16)
    tell("invariant", trained(trainer))
    trainer = trainer_in(folder / "stock", sizes=SIZES, **options | {"max_steps": 1})
    trl.use_in(trainer, compute_dtype=torch.bfloat16)
    tell("without invariant", trained(trainer))
    # Threads of vLLM's modules would keep the process.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
