import pytest
import torch

from rl_kernels.demo.train import Settings, Trainer


@pytest.fixture(scope="session")
def trained(one_thread):
    """A policy after two steps, and a rollout of it."""
    trainer = Trainer(Settings(steps=2, prompts=4, samples_per_prompt=8))
    trainer.run(lambda metrics: None)
    return trainer.policy, trainer.sample(4)[1]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The model is so small that a second thread slows it down, and many times so on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(params=[1, 2])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)
