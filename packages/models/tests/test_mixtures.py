"""Mixtures of experts under invariant(): logits, gradients and chosen experts depend on no other token, bit for bit."""

import copy
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.models import invariant

transformers = pytest.importorskip("transformers")
FAMILIES = "Qwen3Moe Qwen2Moe Mixtral Olmoe GptOss Glm4Moe DeepseekV3 GraniteMoe Phimoe".split()
CUTS = (1, 5, [16, 5, *[1] * 7, 5])
DTYPES = [torch.float32, torch.bfloat16]


class Choosing:
    """A model whose logits ``[B, T, V]`` end with the chosen experts of each layer, sorted by id."""

    def __init__(self, model):
        self.model, self.chosen = model, []
        for module in model.modules():
            if "router" in type(module).__name__.lower():
                module.register_forward_hook(self.keep)

    def keep(self, module, args, results):
        self.chosen += [x.sort(-1).values for x in results if not x.is_floating_point()]

    def __call__(self, **inputs):
        self.chosen.clear()
        output = self.model(**inputs)
        shape = output.logits.shape[:2]
        parts = (output.logits.double(), *(ids.unflatten(0, shape).double() for ids in self.chosen))
        return SimpleNamespace(logits=torch.cat(parts, -1), past_key_values=output.past_key_values)


def differing(found):
    """Count the tokens whose logits, and whose experts, differ from those alone, and all tokens compared."""
    alone, counts = {}, torch.zeros(3, dtype=torch.long)
    for what, prompt, values in found:
        is_other = values != alone.setdefault(prompt, values)
        if what != "alone":
            parts = is_other[:, :211], is_other[:, 211:]
            counts += torch.tensor([*(int(part.any(1).sum()) for part in parts), len(values)])
    return counts.tolist()


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_experts_do_not_depend_on_the_batch(tiny, prompts, surroundings, family, dtype, device):
    model = tiny(family, dtype, device)
    with torch.no_grad():
        plain = model(prompts[0][None].to(device)).logits[0]
    with invariant(model, strict=True) as handle:
        found = list(surroundings(Choosing(model), prompts, CUTS, device))
    assert differing(found) == [0, 0, differing(found)[2]]
    assert sum(name.endswith("Experts") for name in handle.swapped.values()) >= 1
    assert sum("router" in name.lower() for name in handle.swapped.values()) >= 1
    if dtype == torch.float32:
        close = found[0][2][:, :211].float()
        torch.testing.assert_close(close, plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))
