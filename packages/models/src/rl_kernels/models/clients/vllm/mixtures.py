"""vLLM's mixtures of experts on ``route`` and ``experts``, by the router's definition that ``invariant(model)`` has.

A block's router and experts are one custom op, so that neither vLLM's router nor its choice of a kernel for the experts
has a say. The experts' weights stay as vLLM loads them, ``w13[E, 2F, D]`` and ``w2[E, D, F]``: those are the operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.models.mixtral import MixtralMoE
from vllm.model_executor.models.olmoe import OlmoeMoE
from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock

from rl_kernels.models.clients.vllm.ops import mixture
from rl_kernels.models.mixtures.routers import Form, form_of

FAMILIES: dict[Any, Any] = {
    Qwen3MoeSparseMoeBlock: Qwen3MoeTopKRouter,
    MixtralMoE: MixtralTopKRouter,
    OlmoeMoE: OlmoeTopKRouter,
}
"""vLLM's blocks, and the routers that transformers has in their place."""


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


def _made(init: Callable[..., None], router: Any) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.form = form_in(router, get_current_vllm_config().model_config.hf_text_config)

    return __init__


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    form, layer = self.form, self.experts.routed_experts
    rows = hidden_states.view(-1, hidden_states.shape[-1])
    weights = self.gate.weight, layer.w13_weight, layer.w2_weight
    out: torch.Tensor = mixture(rows, *weights, layer.top_k, form.scoring, form.normalize, form.rounds, *form.wide)
    return out.view(hidden_states.shape)


_inits: dict[Any, Callable[..., None]] = {block: block.__init__ for block in FAMILIES}
"""vLLM's own constructors."""


def install() -> None:
    """Replace the blocks, and keep the weights of their experts as they are loaded."""
    UnquantizedFusedMoEMethod.register_oot(KeptExperts, name=UnquantizedFusedMoEMethod.__name__)
    for block, router in FAMILIES.items():
        block.__init__, block.forward = _made(_inits[block], router), _forward
