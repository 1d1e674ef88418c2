"""verl on our operators: set ``VERL_USE_EXTERNAL_MODULES=rl_kernels.models.clients.verl``, and enable fused kernels.

verl imports the module in every worker. From then on its fused forward with backend ``torch`` takes log-probabilities
and entropy from hidden states by ``linear_logp``: with the head's bias and LoRA adapter, a soft cap and a scale of the
logits. ``RL_KERNELS_MEMORY=fast`` lets an update keep logits for backward. verl's FSDP engine refuses one temperature
per sample with fused kernels; with this module it accepts them. Other backends, vision models and other engines of verl
do not change. With ``RL_KERNELS_VLLM=1`` the models of that backend are also made batch-invariant, since the rollout in
vLLM has the bits of such models, and verl's validation of its configuration refuses what breaks this. Written for verl
0.9.1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from rl_kernels.models.clients.verl import engine
from rl_kernels.models.clients.verl.forward import forward_of, is_ours, scores
from rl_kernels.models.clients.verl.settings import checked
from rl_kernels.models.clients.vllm import VARIABLE
from rl_kernels.models.invariance import invariant
from rl_kernels.models.logits import check_logits
from rl_kernels.models.swap import replaced

__all__ = ["install"]


def install() -> None:
    """Replace verl's fused forward; importing this module does so, and a second call changes nothing.

    Raises:
        ImportError: the installed verl does not have the hooks of verl 0.9.1.
    """
    from verl.models.transformers import dense_common, monkey_patch
    from verl.utils import config

    hooks = (
        (dense_common, ("forward_with_torch_backend", "CausalLMOutputForPPO")),
        (monkey_patch, ("patch_forward_with_backends",)),
        (config, ("validate_config",)),
    )
    missing = [f"{module.__name__}.{name}" for module, names in hooks for name in names if not hasattr(module, name)]
    if missing:
        raise ImportError(f"verl: expected the hooks of verl {engine.KNOWN}, {missing[0]} is missing")
    if not hasattr(dense_common.forward_with_torch_backend, "replaced"):
        dense_common.forward_with_torch_backend = forward_of(
            dense_common.forward_with_torch_backend, dense_common.CausalLMOutputForPPO
        )
        monkey_patch.patch_forward_with_backends = _with_engine(monkey_patch.patch_forward_with_backends)
        config.validate_config = checked(config.validate_config)


def _with_engine(patch: Callable[..., None]) -> Callable[..., None]:
    """Return verl's function that patches a model, extended to check the model and to patch the engine.

    The engine calls this function, and is patched in that call: when verl imports this module, the engine cannot be
    imported yet.
    """

    def patched(model: Any, *args: Any, **options: Any) -> None:
        original_forward = type(model).forward
        patch(model, *args, **options)
        # For a second model of a class, the class is patched already.
        if is_ours(model) and not original_forward.__module__.startswith(("verl.", "rl_kernels.")):
            with replaced(type(model), "forward", original_forward):
                check_logits(model, partial(scores, model))
        if is_ours(model) and os.environ.get(VARIABLE) == "1":
            # Before FSDP wraps it.
            invariant(model)
        engine_module = sys.modules.get(engine.MODULE)
        if engine_module is not None:
            engine.install(engine_module)

    return patched


install()
