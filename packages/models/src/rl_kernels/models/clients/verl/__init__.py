"""verl on our operators: ``VERL_USE_EXTERNAL_MODULES=rl_kernels.models.clients.verl``, and verl's fused kernels on.

verl imports the module in every worker. From then on its fused forward, backend ``torch``, takes log-probabilities and
entropy of the model's hidden states from ``linear_logp``: with a bias of the head, a LoRA adapter on it, a soft cap, a
factor of the logits. The FSDP engine, which refuses a temperature for each sample with fused kernels, hands it on. What
else verl does stays as it is: other backends, vision models, other engines. Read off verl 0.9.1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from rl_kernels.models.clients.verl import engine
from rl_kernels.models.clients.verl.forward import forward_of, is_ours, scores
from rl_kernels.models.logits import check_logits
from rl_kernels.models.swap import replaced

__all__ = ["install"]


def install() -> None:
    """Put our forward in the place of verl's; importing this module does so, and a second call changes nothing.

    Raises:
        ImportError: verl has not the hooks of verl 0.9.1.
    """
    from verl.models.transformers import dense_common, monkey_patch

    hooks = (
        (dense_common, ("forward_with_torch_backend", "CausalLMOutputForPPO")),
        (monkey_patch, ("patch_forward_with_backends",)),
    )
    missing = [f"{module.__name__}.{name}" for module, names in hooks for name in names if not hasattr(module, name)]
    if missing:
        raise ImportError(f"verl: expected the hooks of verl {engine.KNOWN}, {missing[0]} is not there")
    if not hasattr(dense_common.forward_with_torch_backend, "replaced"):
        dense_common.forward_with_torch_backend = forward_of(
            dense_common.forward_with_torch_backend, dense_common.CausalLMOutputForPPO
        )
        monkey_patch.patch_forward_with_backends = _with_engine(monkey_patch.patch_forward_with_backends)


def _with_engine(patch: Callable[..., None]) -> Callable[..., None]:
    """Return verl's function that patches a model so that it sees to the engine too, which calls it.

    When verl imports this module, its engines cannot be imported yet.
    """

    def patched(model: Any, *args: Any, **options: Any) -> None:
        before = type(model).forward
        patch(model, *args, **options)
        # A second model of a class finds it patched already.
        if is_ours(model) and not before.__module__.startswith(("verl.", "rl_kernels.")):
            with replaced(type(model), "forward", before):
                check_logits(model, partial(scores, model))
        found = sys.modules.get(engine.MODULE)
        if found is not None:
            engine.install(found)

    return patched


install()
