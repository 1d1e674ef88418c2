"""Others replace a module's forward: before ``invariant``, after it, and around ``undo``; no order breaks the model.

And copies of such models compute with their own weights.
"""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn

from rl_kernels.models import audit, head_logp, invariant
from rl_kernels.models.parallel import parallelize

accelerate = pytest.importorskip("accelerate")


def offloaded(model, folder):
    accelerate.cpu_offload(model, "cpu")


def on_disk(model, folder):
    accelerate.disk_offload(model, folder, "cpu")


def split(model, folder):
    places = {name: "cpu" for name, _ in model.named_modules() if name.count(".") < 2 and name not in ("", "model")}
    accelerate.dispatch_model(model, {**places, "lm_head": "disk"}, "cpu", offload_dir=folder)


def wrapped(model, folder):
    for module in model.modules():
        module.forward = functools.partial(lambda own, *args, **options: own(*args, **options), module.forward)


def compiled(model, folder):
    model.model.layers[0].mlp.compile(backend="eager")


ACCELERATE = (offloaded, on_disk, split)
ORDERS = [
    order
    for order in itertools.permutations(("hook", "swap", "undo", "unhook"))
    if order.index("swap") < order.index("undo") and order.index("hook") < order.index("unhook")
]


@pytest.mark.parametrize("hook", [*ACCELERATE, wrapped, compiled])
@torch.no_grad()
def test_hooks_and_swaps_in_any_order(hook, tiny, prompts, tmp_path):
    model, ids, handle = tiny(), prompts[0][None], None
    plain = model(ids).logits
    with invariant(model):
        swapped = model(ids).logits
    assert not torch.equal(plain, swapped)
    # Others cannot be told apart from a model's own code, so they may only come after.
    for order in ORDERS if hook in ACCELERATE else [("swap", "hook", "undo")]:
        model, is_swapped = tiny(), False
        for step in order:
            if step == "hook":
                hook(model, tmp_path)
            elif step == "unhook":
                accelerate.hooks.remove_hook_from_module(model, recurse=True)
            elif step == "swap":
                handle, is_swapped = invariant(model, strict=True), True
            elif step == "undo":
                handle.undo()
                is_swapped = False
            assert torch.equal(model(ids).logits, swapped if is_swapped else plain), (order, step)
        assert type(model.lm_head) is nn.Linear
        assert hook is wrapped or invariant(model, strict=True).left == {}


@pytest.mark.parametrize("hook", ACCELERATE)
@torch.no_grad()
def test_audit_and_head_of_a_split_model(hook, tiny, tmp_path):
    model, hidden, ids = tiny(), torch.randn(5, 32), torch.arange(5)
    expected = head_logp(model.lm_head, hidden, ids)
    hook(model, tmp_path)
    assert torch.equal(head_logp(model.lm_head, hidden, ids), expected)
    with invariant(model):
        assert audit(model, prompts=2, length=5).passed


def test_an_offloaded_part_of_a_head_is_refused(tiny):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(nn.Sequential(tiny().lm_head), peft.LoraConfig(target_modules=["0"]))
    made = adapted.base_model.model[0]
    accelerate.cpu_offload(made, "cpu")
    with pytest.raises(TypeError, match=r"^head: accelerate offloads the weight of base_layer; .* device_map"):
        head_logp(made, torch.randn(5, 32), torch.arange(5))


def checkpointed(model):
    model.gradient_checkpointing_enable()
    return invariant(model).swapped


def hooked(model):
    invariant(model)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


CHANGES = {"invariant": invariant, "parallelize": parallelize, "checkpoints": checkpointed, "accelerate": hooked}


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_computes_with_its_own_weights(change, tiny, prompts):
    """It has the bits of a model that was changed with those weights, whatever happens to the original."""
    sizes = {"hidden_size": 256, "intermediate_size": 256} if change == "parallelize" else {}
    original, other, ids = tiny(**sizes), tiny(**sizes), prompts[0][None]
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(1.25)
    weights = copy.deepcopy(other.state_dict())
    kept = CHANGES[change](original), CHANGES[change](other)
    assert kept
    with torch.no_grad():
        before, expected = original(ids).logits, other(ids).logits
        found = copy.deepcopy(copy.deepcopy(original))
        found.load_state_dict(weights)
        assert torch.equal(found(ids).logits, expected)
        assert torch.equal(found(ids).logits[:, :3], found(ids[:, :3]).logits)
        assert torch.equal(original(ids).logits, before)
        if change == "invariant":
            with pytest.raises(
                TypeError, match=r"^Invariance: a handle cannot be copied; invariant\(copy of the model"
            ):
                copy.deepcopy({"model": original, "handle": kept[0]})
            kept[0].undo()
            assert torch.equal(found(ids).logits, expected)
            invariant(found).undo()
            assert type(found.lm_head) is nn.Linear
