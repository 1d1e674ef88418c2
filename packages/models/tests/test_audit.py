"""The audit: it names a planted culprit, passes what is clean, and compares what it says."""

import re

import pytest
import torch
from torch import nn

from rl_kernels.core.testing import Draw
from rl_kernels.models import attention, audit, cli, invariant
from rl_kernels.models.audits import random_prompts
from rl_kernels.models.differ import ulps


class Shift(nn.Module):
    """Moves every row by a bit that follows the size of the batch."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *args):
        return self.inner(x, *args) * (1 + 2.0**-22 * (len(x) - 1))


class Outside(nn.Module):
    """Does it between its children, where no module of its own is to blame."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()

    def forward(self, x):
        return self.second(self.first(x) + 2.0**-20 * len(x))


class Clean(nn.Module):
    def forward(self, x):
        return x * 2


def rows(count=6):
    return Draw(torch.float32, seed=1).normal(count, 5) + 10


def test_clean_rows_pass_and_the_model_is_left_as_it_was():
    model = nn.Sequential(Clean(), nn.Dropout(0.5)).train()
    model[0].eval()
    result = audit(model, rows())
    assert result.passed
    assert result.culprit is None
    # Input and output of three modules; the batch and its reverse have six rows each, as have both halves.
    assert result.compared == 3 * 2 * 6 * 3
    assert result.variants == ("batched", "in another place of the batch", "in two batches")
    assert result.skipped == ()
    assert [module.training for module in model.modules()] == [True, False, True]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.smoke
def test_culprit_is_named():
    result = audit(nn.Sequential(Clean(), Shift(nn.ReLU()), nn.ReLU()), rows())
    assert not result.passed
    found = result.culprit
    assert (found.module, found.type, found.place.kind) == ("1", "Shift", "output")
    assert (found.variant, found.sample, found.token) == ("batched", 0, None)
    assert (found.shape, found.alone) == ((6, 5), (1, 5))
    assert 0 < found.ulp < 20
    assert found.differ <= found.elements == 5
    assert re.match(r"1 \(Shift\): output, shape \(6, 5\) here, \(1, 5\) alone: \d of 5 elements differ", str(found))
    # Code between children is blamed on their parent.
    found = audit(nn.Sequential(Clean(), Outside()), rows()).culprit
    assert (found.module, found.type, found.place.module) == ("1", "Outside", "1.second")
    assert "what it gives to second, input [0]" in str(found)


def test_a_batch_of_several_inputs_and_a_module_called_twice():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.same = Clean()

        def forward(self, x, y):
            return self.same(self.same(x)) + y

    assert audit(Two(), (rows(), rows())).passed
    assert not audit(Shift(Two()), (rows(), rows())).passed


def test_bad_arguments():
    for inputs, error, message in (
        (None, ValueError, "inputs: expected prompts or a batch"),
        (torch.zeros(1, 3), ValueError, "inputs: expected at least two samples, got 1"),
        ((torch.zeros(2, 3), torch.zeros(3)), TypeError, "inputs: expected a list of 1-D token ids, or tensors"),
        ([torch.zeros(3).long()], ValueError, "inputs: expected at least two prompts"),
    ):
        with pytest.raises(error, match=message):
            audit(Clean(), inputs)
    for name in ("prompts", "length", "seed"):
        with pytest.raises(ValueError, match=f"{name}: expected an integer <= "):
            audit(nn.Linear(2, 2), torch.ones(2, 2), **{name: 2**70})
        with pytest.raises(TypeError, match=f"{name}: expected an integer, got float"):
            audit(nn.Linear(2, 2), torch.ones(2, 2), **{name: 4.0})


def test_nothing_to_compare_is_no_pass():
    class Total(nn.Module):
        def forward(self, x):
            return x.sum()

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.total = Total()

        def forward(self, x):
            return self.total(x.t().contiguous())

    with pytest.raises(ValueError, match="nothing could be compared"):
        audit(Hidden(), (torch.arange(4),))


def test_ulps():
    one = torch.tensor([1.0, -1.0, 0.0, 1.0, 2.0])
    other = torch.tensor([1.0, -1.0 - 2**-23, -0.0, 1 + 2**-22, -2.0])
    assert ulps(one, other).tolist() == [0, 1, 1, 2, 2 * 0x40000000]
    assert ulps(torch.ones(1).bfloat16(), torch.tensor([1 + 2**-7]).bfloat16()).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_llama_under_invariant_passes(tiny, dtype, device):
    model = tiny(dtype=dtype, device=device)
    with invariant(model):
        result = audit(model, prompts=6)
    assert result.passed
    assert result.skipped == ()
    assert len(result.variants) == 5


def test_a_model_in_a_wrapper_is_run_as_a_language_model(tiny):
    peft = pytest.importorskip("peft")
    for task in ("CAUSAL_LM", None):
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type=task, init_lora_weights=False)
        model = peft.get_peft_model(tiny(), config)
        with invariant(model, strict=True):
            result = audit(model)
        assert result.passed
        assert len(result.variants) == 5


def test_planted_culprit_in_a_llama(tiny):
    plants = {
        "mlp.down_proj": lambda layer: setattr(layer.mlp, "down_proj", Shift(layer.mlp.down_proj)),
        "self_attn.k_proj": lambda layer: setattr(layer.self_attn, "k_proj", nn.Linear(32, 16)),
        "post_attention_layernorm": lambda layer: setattr(
            layer, "post_attention_layernorm", Shift(layer.post_attention_layernorm)
        ),
    }
    for name, plant in plants.items():
        model = tiny()
        with invariant(model):
            plant(model.model.layers[0])
            found = audit(model).culprit
        # On some machines nn.Linear gives the same rows in all these batches.
        if found is not None or "k_proj" not in name:
            assert found.module == f"model.layers.0.{name}"


def test_attention_that_follows_the_batch_is_blamed_on_its_module(tiny):
    """Attention is no module: what it gives to o_proj is the first that differs."""
    model = tiny()
    with invariant(model):
        real = attention.det_attention

        def shifted(q, *args, **options):
            return real(q, *args, **options) * (1 + 2.0**-20 * (len(q) - 1))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "det_attention", shifted)
            found = audit(model).culprit
    assert (found.module, found.type) == ("model.layers.0.self_attn", "LlamaAttention")
    assert found.place.module == "model.layers.0.self_attn.o_proj"


def test_only_the_cache_shows_a_culprit_that_follows_the_length(tiny):
    class Length(nn.Module):
        def forward(self, x):
            return x * (1 + 2.0**-20 * (x.shape[1] == 1))

    model = tiny()
    model.model.layers[1].mlp.act_fn = nn.Sequential(model.model.layers[1].mlp.act_fn, Length())
    with invariant(model):
        result = audit(model)
    assert [finding.variant for finding in result.findings] == ["in chunks of 5, the rest token by token"]
    assert result.culprit.module == "model.layers.1.mlp.act_fn.1"
    assert result.culprit.token == 20


def test_a_mixture_is_compared_by_its_experts_too(tiny):
    """No token chooses other experts under invariant(); a router that depends on the batch is counted and named."""
    model = tiny("Qwen3Moe", torch.bfloat16)
    lengths = [len(ids) for ids in random_prompts(211, 4, 23, 0)]
    with invariant(model, strict=True):
        result = audit(model)
        assert result.passed
        *batches, chunks = result.variants
        assert result.rerouted == dict.fromkeys(batches, (0, sum(lengths))) | {chunks: (0, max(lengths))}
        assert cli.text(result)[-2].endswith("; 0 of 23 tokens choose other experts")
        router = model.model.layers[0].mlp.gate
        # The order of the slots alone: no number differs before the experts, and each token has the experts it had.
        hook = router.register_forward_hook(lambda _, args, out: (*out[:2], out[2].roll(int(len(out[2]) > 23), 1)))
        found = audit(model)
        assert (found.culprit.module, found.culprit.place.path) == ("model.layers.0.mlp.gate", "[2]")
        hook.remove()
        router.register_forward_pre_hook(lambda _, args: args[0] + 0.1 * (len(args[0]) > 23))
        counts = audit(model).rerouted
        assert 0 < counts[batches[0]][0] < sum(lengths)
        assert counts[chunks] == (0, 23)
