"""A model that computes in 16 bits, and whose FP32 weights an optimizer updates.

A learning rate of RL, such as 1e-6, is lost in BF16 weights: an update is smaller than the distance to the next number.
FP32 weights under autocast move, but an engine that samples holds 16-bit ones, and computes other bits. Here the passes
of training, the engine and the checkpoint all read the same 16-bit weights, which are the FP32 ones rounded once after
each step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_kernels.core import validate as check

HALF = (torch.bfloat16, torch.float16)
SAVED = "rl_kernels_master_weights"
"""Key of the FP32 weights in the state of an optimizer."""


class MasterWeights:
    """The FP32 weights of a model whose parameters it casts, in place, when it is made.

    Gradients are accumulated in FP32, in ``.grad`` of the model's parameters, so clipping by ``model.parameters()``
    works as before::

        masters = MasterWeights(model, torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        masters.update_by(optimizer)

    Args:
        model: its FP32 parameters are cast; others, and buffers, stay. It must not be wrapped by FSDP or DeepSpeed,
            which have master weights of their own.
        dtype: BF16 or FP16, in which the model computes from now on.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
        check.choice("dtype", dtype, HALF)
        self._masters: dict[nn.Parameter, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if type(parameter.data) is not torch.Tensor:
                raise ValueError(f"model: expected whole parameters, {name} is a {type(parameter.data).__name__}")
        for parameter in model.parameters():
            if parameter.dtype != torch.float32:
                continue
            master = parameter.data
            parameter.data, parameter.grad = master.to(dtype), None
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32
                self._masters[parameter] = master

    def update_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of the model's parameters update the FP32 weights, and round them after each step.

        A step uses the gradients up, as does ``zero_grad``. The optimizer's ``state_dict`` holds the FP32 weights too.
        Optimizers whose state has 8 bits (bitsandbytes, torchao) are supported.
        ``step(closure)`` is not supported.

        Raises:
            ValueError: the optimizer has state already, or none of these parameters.
        """
        if optimizer.state:
            raise ValueError("optimizer: expected one that has taken no step")
        groups = optimizer.param_groups
        parameters = [x for group in groups for x in group["params"] if x in self._masters]
        if not parameters:
            raise ValueError("optimizer: expected one with parameters of the model")
        masters = [self._masters[x] for x in parameters]
        for group in groups:
            group["params"] = [self._masters.get(x, x) for x in group["params"]]
        self._keep_overrides(optimizer)

        def before(*_: Any) -> None:
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad = parameter.grad

        @torch.no_grad()
        def after(*_: Any) -> None:
            torch._foreach_copy_(parameters, masters)
            clear()

        def clear() -> None:
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.grad = master.grad = None

        def saved(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, SAVED: masters}

        @torch.no_grad()
        def loaded(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            if SAVED not in state:
                raise ValueError("state_dict: expected one with FP32 weights, saved by an optimizer that updates them")
            for master, value in zip(masters, state[SAVED], strict=True):
                master.copy_(value)
            torch._foreach_copy_(parameters, masters)
            return {name: value for name, value in state.items() if name != SAVED}

        zero_grad = optimizer.zero_grad

        def cleared(set_to_none: bool = True) -> None:
            clear()
            zero_grad(set_to_none)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        optimizer.register_state_dict_post_hook(saved)
        optimizer.register_load_state_dict_pre_hook(loaded)
        optimizer.zero_grad = cleared  # type: ignore[method-assign]

    def _keep_overrides(self, optimizer: Any) -> None:
        """Apply what bitsandbytes was told of single weights, such as 32-bit state of embeddings, to the FP32 ones."""
        manager = getattr(optimizer, "mng", None)
        if manager is None:
            return
        for module, name, config in manager.module_weight_config_triple:
            master = self._masters.get(getattr(module, name))
            if master is not None:
                manager.override_config(master, key_value_dict=config)
