from dataclasses import replace

import pytest
import torch

from rl_kernels.demo.task import CPU, GPU

SMALL = replace(CPU, steps=3, prompts=4, samples_per_prompt=8)
# Sequences of fewer positions come out the same in stock PyTorch on many a CPU.
LLAMA = replace(
    GPU,
    **{"steps": 3, "prompts": 4, "samples_per_prompt": 4, "shortest": 6, "measure_every": 2, "learning_rate": 3e-3},
    **{"warmup_steps": 1, "width": 64, "feed_forward": 128, "layers": 2, "heads": 2, "kv_heads": 1},
)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The model is so small that a second thread slows it down, and many times so on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small():
    return SMALL


@pytest.fixture(scope="session")
def llama():
    pytest.importorskip("transformers")
    return LLAMA


@pytest.fixture(scope="session", params=["small", "llama"])
def settings(request):
    """A small run of either model, on the CPU."""
    return request.getfixturevalue(request.param)
