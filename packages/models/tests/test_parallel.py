"""A parallel model has the bits of one process: forward, gradients and training, for each number of ranks.

On one GPU its processes speak over gloo.
"""

import hashlib

import pytest
import torch
from torch import distributed

from rl_kernels.core.testing import bits_of
from rl_kernels.core.testing.ranks import run_ranks
from rl_kernels.models import head_logp
from rl_kernels.models.parallel import clip_grad_norm, full_state_dict, parallelize

transformers = pytest.importorskip("transformers")

STEPS, BATCH, LENGTH, VOCAB = 3, 2, 16, 9000
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


def model_of(kind, dtype=torch.float32):
    # Biases of row-parallel layers too.
    biases = {"attention_bias": True, "mlp_bias": True} if kind == "Llama" else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **biases, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)


def trained(model):
    """Train a model; return losses, log-probs, and whole weights and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    record = {}
    for step in range(STEPS):
        ids = batch_of(step)
        hidden = model.model(input_ids=ids).last_hidden_state
        stats = head_logp(model.lm_head, hidden[:, :-1], ids[:, 1:], return_stats=True)
        loss = -stats.logp.mean() - 0.01 * stats.entropy.mean()
        loss.backward()
        if step == 0:
            record["gradients"] = gradients_of(model)
            with torch.no_grad():
                record["logits"] = model(input_ids=ids).logits
        record[f"norm {step}"] = clip_grad_norm(model, 0.2)
        optimizer.step()
        optimizer.zero_grad()
        record[f"logp {step}"], record[f"loss {step}"] = stats.logp.detach(), loss.detach()
    record["weights"] = {name: value.detach() for name, value in full_state_dict(model).items()}
    return record


def gradients_of(model):
    """Return the gradients of the whole weights."""
    shadow = {name: value.grad for name, value in model.named_parameters()}
    kept = {name: value.data for name, value in model.named_parameters()}
    try:
        for name, value in model.named_parameters():
            value.data = shadow[name]
        return {name: value.clone() for name, value in full_state_dict(model).items()}
    finally:
        for name, value in model.named_parameters():
            value.data = kept[name]


def digests(record):
    """Return a digest of the bits of each tensor of a record."""
    found = {}
    for key, value in record.items():
        parts = value if isinstance(value, dict) else {"": value}
        for name, part in parts.items():
            found[f"{key} {name}"] = hashlib.sha256(bits_of(part).numpy().tobytes()).hexdigest()
    return found


def stepped(model):
    """Return the loss and the gradients of the whole weights under autocast, with activation checkpoints."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.train().model(input_ids=batch_of(0)).last_hidden_state
        loss = model.lm_head(hidden).float().square().mean()
    loss.backward()
    return {"loss": loss.detach(), "gradients": gradients_of(model)}


JOBS = {
    "Llama": ("Llama", torch.float32, trained),
    "Qwen2": ("Qwen2", torch.float32, trained),
    "Qwen3": ("Qwen3", torch.bfloat16, trained),
    "autocast": ("Qwen3", torch.float32, stepped),
}


def done(job, group=None, cuts_tokens=False):
    kind, dtype, run = JOBS[job]
    model = model_of(kind, dtype)
    parallelize(model, group, sequence_parallel=cuts_tokens)
    return digests(run(model))


def in_ranks(rank):
    """Run jobs over all four ranks, then one half of the jobs over two ranks and the others over the other two."""
    pairs = [distributed.new_group(ranks) for ranks in ((0, 1), (2, 3))]
    found = {job: done(job, distributed.group.WORLD, job == "Llama") for job in ("Llama", "Qwen2")}
    if rank < 2:
        return found | {"Llama of two": done("Llama", pairs[0])}
    return found | {f"{job} of two": done(job, pairs[1], True) for job in ("Qwen3", "autocast")}


def test_training_has_the_bits_of_one_process(torch_threads):
    with torch_threads(1):
        expected = {job: done(job) for job in JOBS}
    for found in run_ranks(in_ranks, 4, timeout=480):
        for job, record in found.items():
            wanted = expected[job.split()[0]]
            assert record.keys() == wanted.keys()
            assert [name for name, digest in wanted.items() if record[name] != digest] == [], job


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


def passed_in_a_rank(rank, kind, cuts_tokens):
    model = model_of(kind, torch.bfloat16).cuda()
    parallelize(model, distributed.group.WORLD, sequence_parallel=cuts_tokens)
    return passed(model)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "world", "cuts_tokens"), [("Llama", 2, False), ("Qwen3", 4, True)])
def test_one_gpu(kind, world, cuts_tokens):
    model = model_of(kind, torch.bfloat16).cuda()
    parallelize(model)
    expected = passed(model)
    for record in run_ranks(passed_in_a_rank, world, kind, cuts_tokens, timeout=120.0):
        differ = [name for name, value in expected.items() if not bits_of(record[name]).equal(bits_of(value))]
        assert differ == []
