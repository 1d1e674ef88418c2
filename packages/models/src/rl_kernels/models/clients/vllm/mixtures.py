"""vLLM's mixtures of experts on ``route`` and ``experts``, by the router's definition that ``invariant(model)`` has.

A block's router and experts are one custom op, so that neither vLLM's router nor its choice of a kernel for the experts
has a say. The experts' weights stay as vLLM loads them, ``w13[E, 2F, D]`` and ``w2[E, D, F]``: those are the operands.

A trainer pushes the parameters of transformers, which has the experts of a layer in one tensor. vLLM 0.24 drops such a
tensor of Qwen3-MoE without a word, and no version knows that of Mixtral, so models load them by a checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.models.mixtral import MixtralForCausalLM, MixtralMoE
from vllm.model_executor.models.olmoe import OlmoeForCausalLM, OlmoeMoE
from vllm.model_executor.models.qwen2_moe import Qwen2MoeForCausalLM, Qwen2MoeSparseMoeBlock
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoeSparseMoeBlock

from rl_kernels.models.clients.vllm.ops import add_gated, mixture
from rl_kernels.models.mixtures.routers import Form, form_of


class Family(NamedTuple):
    """A family of mixtures.

    Attributes:
        model: vLLM's class.
        block: its class of a router and experts.
        router: the router of transformers.
        name: the block's name in a checkpoint.
        parts: names of gate, up and down there.
    """

    model: Any
    block: Any
    router: Any
    name: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


FAMILIES = (
    Family(MixtralForCausalLM, MixtralMoE, MixtralTopKRouter, "block_sparse_moe", ("w1", "w3", "w2")),
    Family(OlmoeForCausalLM, OlmoeMoE, OlmoeTopKRouter),
    Family(Qwen2MoeForCausalLM, Qwen2MoeSparseMoeBlock, Qwen2MoeTopKRouter),
    Family(Qwen3MoeForCausalLM, Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter),
)


class KeptExperts(UnquantizedFusedMoEMethod):
    """Holds the experts of a layer as they are loaded, without a kernel of vLLM."""

    is_monolithic = False

    def __init__(self, moe: Any) -> None:
        """Make the method without a choice among vLLM's kernels, which would pad or reorder weights."""
        super(UnquantizedFusedMoEMethod, self).__init__(moe)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **options: Any
    ) -> tuple[int, int]:
        """Return the sizes as they are."""
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weights as they were loaded."""


def form_in(router: Any, text: Any) -> Form:
    """Return the definition of a router of transformers under a model's configuration.

    Raises:
        ValueError: the installed transformers has an unknown one.
    """
    # vLLM makes models on their device.
    with torch.device("meta"):
        module = router(text)
    with torch.device("cpu"):
        form = form_of(module)
    if form is None or any(form.has):
        raise ValueError(f"model: {router.__name__} is an unknown kind of router")
    return form


def by_checkpoint(family: Family, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights by the names of a checkpoint: ``gate_up_proj[E, 2F, D]`` and ``down_proj[E, D, F]`` by expert."""
    gate, up, down = family.parts
    for parameter, value in weights:
        name = parameter.replace(".mlp.", f".{family.name}.")
        layer, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for expert, both in enumerate(value):
                first, second = both.chunk(2)
                yield f"{layer}.experts.{expert}.{gate}.weight", first
                yield f"{layer}.experts.{expert}.{up}.weight", second
        elif kind == "down_proj":
            for expert, each in enumerate(value):
                yield f"{layer}.experts.{expert}.{down}.weight", each
        else:
            yield name, value


def _replace(family: Family) -> None:
    init, load = family.block.__init__, family.model.load_weights

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        method = self.experts.routed_experts.quant_method
        if not isinstance(method, KeptExperts):
            raise ValueError(f"experts: expected unquantized ones with RL_KERNELS_VLLM=1, got {type(method).__name__}")
        # Its module would apply the gate too, in code that the compiler may fuse.
        if getattr(self, "shared_expert", None) is not None:
            self.shared_expert.expert_gate = None
        self.form = form_in(family.router, get_current_vllm_config().model_config.hf_text_config)

    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return load(self, by_checkpoint(family, weights))

    family.block.__init__, family.block.forward, family.model.load_weights = __init__, _forward, load_weights


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    form, layer = self.form, self.experts.routed_experts
    rows = hidden_states.view(-1, hidden_states.shape[-1])
    weights = self.gate.weight, layer.w13_weight, layer.w2_weight
    out: torch.Tensor = mixture(rows, *weights, layer.top_k, form.scoring, form.normalize, form.rounds, *form.wide)
    if getattr(self, "shared_expert", None) is not None:
        gate, _ = self.shared_expert_gate(rows)
        out = add_gated(out, gate, self.shared_expert(rows))
    return out.view(hidden_states.shape)


def install() -> None:
    """Replace the blocks, keep the weights of experts as they are loaded, and load those of trainers."""
    UnquantizedFusedMoEMethod.register_oot(KeptExperts, name=UnquantizedFusedMoEMethod.__name__)
    for family in FAMILIES:
        _replace(family)
