"""What ``parallelize`` refuses, on each rank alike, and what works besides training."""

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from rl_kernels.core.testing import bits_of
from rl_kernels.core.testing.ranks import run_ranks
from rl_kernels.linear_logp import vocab_shards
from rl_kernels.models import head_logp, sequence_logp
from rl_kernels.models.parallel import (
    ColumnParallel,
    RowParallel,
    VocabParallel,
    full_state_dict,
    load_full_state_dict,
    parallelize,
)

sys.path.insert(0, str(Path(__file__).parent))
from test_parallel import SIZES, VOCAB, batch_of, model_of

transformers = pytest.importorskip("transformers")
peft, safetensors = map(pytest.importorskip, ("peft", "safetensors.torch"))


def llama(**sizes):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "vocab_size": 50, **sizes}))


def other(family, **sizes):
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "vocab_size": 50, **sizes})
    return transformers.AutoModelForCausalLM.from_config(config)


REFUSED = [
    (lambda: torch.nn.Linear(4, 4), "TypeError: model: expected a PreTrainedModel of transformers, got Linear"),
    (
        lambda: llama(hidden_size=240, head_dim=30),
        "ValueError: model.layers.0.self_attn.q_proj: out_features: expected a multiple of 128",
    ),
    (
        lambda: llama(intermediate_size=400),
        "ValueError: model.layers.0.mlp.gate_proj: out_features: expected a multiple of 128",
    ),
    (lambda: other("GPT2"), "ValueError: model: expected a config with base_model_tp_plan, GPT2Model has none"),
    (
        lambda: other("Qwen3Moe", num_experts=2, moe_intermediate_size=128),
        "expected linear layers that are cut by columns or rows; layers.0.mlp.experts",
    ),
    (lambda: other("Olmo2"), "is 'colwise_gather_output'"),
]


def test_refused_models_are_left_as_they_are():
    for make, text in REFUSED:
        model = make()
        classes = [type(module) for module in model.modules()]
        with pytest.raises((TypeError, ValueError)) as raised:
            parallelize(model)
        assert text in f"{raised.type.__name__}: {raised.value}"
        assert [type(module) for module in model.modules()] == classes


def test_bad_options():
    model = llama()
    with pytest.raises(ValueError, match="segments: expected 2, 4 or 8, got 3"):
        parallelize(model, segments=3)
    with pytest.raises(TypeError, match="mesh: expected a ProcessGroup or a DeviceMesh with one dim, got str"):
        parallelize(model, "tp")
    model.lm_head.weight.main_grad = torch.zeros_like(model.lm_head.weight)
    with pytest.raises(ValueError, match=r"weight.main_grad: expected none yet"):
        parallelize(model)
    del model.lm_head.weight.main_grad
    parallelize(model)
    with pytest.raises(ValueError, match=r"expected a model that is whole; layers.0.self_attn.q_proj is cut already"):
        parallelize(model)
    model.model.layers[0].mlp.down_proj.join_tokens = 32
    with pytest.raises(ValueError, match="join_tokens: expected None on a parallel layer, got 32"):
        model(torch.ones(1, 4, dtype=torch.int64))


def test_a_tied_head_stays_whole_and_styles_alone_give_the_bits_of_parallelize():
    model = llama(tie_word_embeddings=True)
    mlp = copy.deepcopy(model).model.layers[0].mlp
    assert "lm_head" not in parallelize(model).styles
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, style, size in (("gate_proj", ColumnParallel(), 256), ("down_proj", RowParallel(segments=8), 384)):
        style._apply(mlp.get_submodule(name), None)
        x = torch.randn(3, size)
        whole = model.model.layers[0].mlp.get_submodule(name)(x)
        assert bits_of(whole).equal(bits_of(mlp.get_submodule(name)(x)))


def styles_alone(rank, world):
    """Return which modules differ from one process after ``parallelize_module``; the head has a bias."""
    torch.manual_seed(0)
    parts = torch.nn.ModuleDict(
        {"up": torch.nn.Linear(256, 384), "down": torch.nn.Linear(384, 256), "head": torch.nn.Linear(256, VOCAB)}
    )
    styles = {"up": ColumnParallel, "down": RowParallel, "head": VocabParallel}
    whole, ids = copy.deepcopy(parts), torch.tensor([0, 8191, VOCAB - 1])
    for name, style in styles.items():
        style()._apply(whole[name], None)
    hidden = torch.linspace(-1, 1, 768).view(3, 256)
    plain, alone = (head_logp(each["head"], hidden, ids) for each in (parts, whole))
    assert torch.equal(plain, alone)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parallelize_module(parts, mesh, {name: style() for name, style in styles.items()})

    def results(modules):
        hidden = modules["down"](modules["up"](torch.linspace(-1, 1, 768).view(3, 256)))
        logp, logits = head_logp(modules["head"], hidden, ids), modules["head"](hidden)
        (logp.sum() + logits.square().mean()).backward()
        start, stop = vocab_shards(VOCAB, world)[rank]
        dbias = modules["head"].bias.grad
        parts = {"dbias": dbias[start:stop] if len(dbias) == VOCAB else dbias, "down": modules["down"].bias.grad}
        return {"logp": logp.detach(), "logits": logits.detach(), **parts}

    wanted = results(whole)
    return [name for name, value in results(parts).items() if not bits_of(value).equal(bits_of(wanted[name]))]


class Attempts(list):
    """The errors of calls."""

    def __call__(self, function):
        try:
            function()
            self.append("no error")
        except (TypeError, ValueError, RuntimeError) as error:
            self.append(f"{type(error).__name__}: {error}")


def refused(attempt, rank, group):
    changed = llama()
    if rank == 1:
        changed.model.norm.weight.data[3] += 1
    attempt(lambda: parallelize(llama(num_key_value_heads=1), group))
    attempt(lambda: parallelize(llama() if rank else llama(intermediate_size=256), group))
    attempt(lambda: parallelize(llama(), group, segments=8 if rank else 4))
    attempt(lambda: parallelize(changed, group))
    attempt(lambda: parallelize(torch.nn.Linear(2, 2) if rank == 1 else llama(), group))


def computed(attempt, rank, group, expected):
    """Return what differs from one process, and from the whole weights."""
    model, ids = model_of("Llama"), batch_of(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize(model, group, sequence_parallel=True)
    attempt(lambda: model(input_ids=ids + rank))
    attempt(lambda: model(input_ids=ids[:, : 8 + rank]))
    attempt(lambda: model(input_ids=ids, **({"attention_mask": torch.ones_like(ids)} if rank else {})))
    found = {name: value.clone() for name, value in full_state_dict(model).items()}
    wanted = {**before, **expected}
    load_full_state_dict(model, {name: value * 2 for name, value in before.items()})
    found["loaded"], wanted["loaded"] = full_state_dict(model)["lm_head.weight"], before["lm_head.weight"] * 2
    load_full_state_dict(model, before)
    found |= answers(model)
    return [name for name, value in wanted.items() if not bits_of(found[name]).equal(bits_of(value))]


@torch.no_grad()
def answers(model):
    ids = batch_of(0)
    hidden = model.model(input_ids=ids).last_hidden_state
    return {
        # 15 tokens do not divide by the ranks, and neither does one new token.
        "odd": model(input_ids=ids[:, :15]).logits,
        "generate": model.generate(ids[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0),
        "sequences": sequence_logp(model, ids, temperature=0.7),
        "logp": head_logp(model.lm_head, hidden, ids, temperature=0.7),
    }


def in_ranks(rank, world, expected, folder):
    attempt, group = Attempts(), distributed.group.WORLD
    refused(attempt, rank, group)
    failed = styles_alone(rank, world) + computed(attempt, rank, group, expected) + saved(attempt, rank, folder)
    return list(attempt), failed


def saved(attempt, rank, folder):
    """Save and change a parallel model in each way; return the weights of what rank 0 saves as the errors say."""
    model = model_of("Llama")
    whole = copy.deepcopy(model.state_dict())
    parallelize(model, distributed.group.WORLD)
    twin = copy.deepcopy(model)
    attempt(lambda: model.save_pretrained(f"{folder}/shards"))
    attempt(lambda: safetensors.save_model(model, f"{folder}/shards"))
    attempt(model.model.layers[0].mlp.state_dict)
    attempt(twin.state_dict)
    attempt(lambda: pickle.dumps(model))
    attempt(lambda: model.load_state_dict(whole, strict=False))
    state = full_state_dict(model)
    if rank == 0:
        model.save_pretrained(f"{folder}/whole", state_dict=state)
    load_full_state_dict(twin, {name: value * 2 for name, value in whole.items()})
    found = {"copy": full_state_dict(twin)["lm_head.weight"] / 2, "original": full_state_dict(model)["lm_head.weight"]}
    twin.resize_token_embeddings(VOCAB + 8)
    attempt(lambda: twin(batch_of(0)))
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["down_proj"]))
    attempt(lambda: model(batch_of(0)))
    return [name for name, value in found.items() if not torch.equal(value, whole["lm_head.weight"])]


def test_ranks_agree_generate_and_save(tmp_path):
    model = model_of("Llama")
    parallelize(model)
    expected = answers(model)
    assert expected["odd"].shape == (2, 15, VOCAB)
    results = run_ranks(in_ranks, 2, 2, expected, str(tmp_path))
    texts = results[0][0]
    wanted = [
        "ValueError: mesh: expected a number of ranks that divides num_key_value_heads = 1, got 2 (on rank 0",
        "ValueError: weights of model: expected the same on every rank of process_group",
        "ValueError: segments: expected the same on every rank of process_group, got 4, 8",
        "ValueError: weights of model: expected the same on every rank",
        "TypeError: model: expected a PreTrainedModel of transformers, got Linear (on rank 1 of process_group)",
        "ValueError: input_ids: expected the same on every rank",
        "ValueError: input_ids: expected the same on every rank",
        "ValueError: attention_mask: expected the same on every rank of process_group, got nothing, ",
        *["RuntimeError: state_dict: "] * 4,
        "TypeError: parallelize: a parallel model cannot be pickled; save rl_kernels.models.parallel.full_state_dict",
        "RuntimeError: Error(s) in loading state_dict",
        "TypeError: parallelize: expected lm_head as it was cut, found torch.nn.",
        "TypeError: parallelize: expected down_proj as it was cut, found peft.",
    ]
    for found, failed in results:
        assert failed == []
        # Of errors of one rank alone, each has its own sizes.
        assert (len(found), found[:8]) == (len(texts), texts[:8])
    assert len(texts) == len(wanted)
    for text, start in zip(texts, wanted, strict=True):
        assert text.startswith(start), text
    assert all("full_state_dict(model)" in text for text in texts[8:13])
    assert "call rl_kernels.models.parallel.load_full_state_dict(model, state)" in texts[13]
    assert not [file for file in tmp_path.rglob("*.safetensors") if file.parent.name != "whole"]
    read, whole = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole"), model_of("Llama").state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in read.state_dict().items())
