"""A parallel model on one GPU, its processes over gloo: logits, log-probs and gradients have one process's bits."""

import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from rl_kernels.core.testing import bits_of
from rl_kernels.core.testing.ranks import run_ranks
from rl_kernels.models import head_logp
from rl_kernels.models.parallel import parallelize

sys.path.insert(0, str(Path(__file__).parent))
from test_parallel import batch_of, gradients_of, model_of

pytestmark = pytest.mark.gpu


def passed(model):
    """Return logits, log-probs and the gradients of the whole weights."""
    ids = batch_of(0).cuda()
    hidden = model.model(input_ids=ids).last_hidden_state
    logp = head_logp(model.lm_head, hidden[:, :-1], ids[:, 1:])
    (-logp.mean()).backward()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    found = {"logits": logits, "logp": logp.detach(), **gradients_of(model)}
    return {name: value.cpu() for name, value in found.items()}


def of_ranks(rank, kind, cuts_tokens):
    model = model_of(kind, torch.bfloat16).cuda()
    parallelize(model, distributed.group.WORLD, sequence_parallel=cuts_tokens)
    return passed(model)


@pytest.mark.parametrize(("kind", "world", "cuts_tokens"), [("Llama", 2, False), ("Qwen3", 4, True)])
def test_one_gpu(kind, world, cuts_tokens):
    model = model_of(kind, torch.bfloat16).cuda()
    parallelize(model)
    expected = passed(model)
    for record in run_ranks(of_ranks, world, kind, cuts_tokens, timeout=120.0):
        differ = [name for name, value in expected.items() if not bits_of(record[name]).equal(bits_of(value))]
        assert differ == []
