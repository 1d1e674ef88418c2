"""The GPU of a tensor becomes the current one, and each thread has its context before the driver is asked."""

from threading import Thread, local
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.core import gpu


@pytest.fixture
def events(monkeypatch):
    """Play GPU 0 of two; the list of what PyTorch was asked for."""
    seen = []
    monkeypatch.setattr(gpu, "_thread", local())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: seen.append("event")))
    monkeypatch.setattr(torch.cuda, "device", lambda index: seen.append(index) or gpu._HERE)
    return seen


def test_the_first_time_in_each_thread_makes_a_context(events):
    def work():
        for _ in range(3):
            with gpu.on_device(0):
                pass

    for _ in range(2):
        thread = Thread(target=work)
        thread.start()
        thread.join()
    assert events == ["event"] * 2


def test_another_device_is_switched_to_and_nothing_for_a_tensor_of_the_cpu(events):
    with gpu.device_of(torch.zeros(1)):
        pass
    assert not events
    tensor = SimpleNamespace(is_cuda=True, get_device=lambda: 1)
    with gpu.device_of(tensor):
        pass
    assert events == [1]
