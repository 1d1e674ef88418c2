"""Arguments whose elements lie far apart in memory: an offset of 32 bits does not reach them."""

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import far
from rl_kernels.grpo_loss import Extras, Objective, group_advantages, grpo_loss
from rl_kernels.grpo_loss.op import OPERATOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")
CALL = Call.of(torch.zeros(1, device=DEVICE))
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
NAMES = ("current_logps", "old_logps", "ref_logps", "completion_mask", "rollout_ratio", "entropy", "rewards")


def results(backend, plain, current, old, ref, mask, ratio, entropy, rewards):
    """Return losses, the gradient and advantages: of the plain loss, or with metrics and all that it may take."""
    current = current.detach().requires_grad_()
    groups = {"samples_per_prompt": len(rewards)} if plain else {"group_boundaries": [0, len(rewards)]}
    options = {"beta": 0.1} if plain else {"objective": Objective(loss_type="dapo", beta=0.1), "return_metrics": True}
    if not plain:
        options["extras"] = Extras(rollout_ratio=ratio, entropy=entropy)
    found = grpo_loss(current, old, ref, rewards, mask, **groups, **options, backend=backend)
    losses, metrics = (found, ()) if plain else found
    (grad,) = torch.autograd.grad(losses.loss, current)
    return [losses.loss.detach(), *losses[1:], *metrics, grad, group_advantages(rewards, **groups, backend=backend)]


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "objective"])
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_elements_beyond_an_offset_of_32_bits(backend, batch, plain):
    torch.manual_seed(0)
    current, old, ref, ratio, entropy = torch.rand(5, batch, 5, device=DEVICE).half()
    rewards, mask = torch.rand(batch, device=DEVICE).half(), torch.rand(batch, 5, device=DEVICE) < 0.7
    arguments = (-current, -old, -ref, mask, ratio, entropy, rewards)
    expected = results(backend, plain, *arguments)
    for place, name in enumerate(NAMES):
        moved = [far(x, 0) if at == place else x for at, x in enumerate(arguments)]
        assert all(map(torch.equal, results(backend, plain, *moved), expected)), name
