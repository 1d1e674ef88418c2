"""``main_grad``: an FP32 buffer to which backward passes add a weight's gradient, in place of ``.grad``."""

from __future__ import annotations

import sys
from typing import Any

import torch

CHECKPOINT = "torch.utils.checkpoint"


def refuse_checkpoint(name: str, operator: str, advice: str) -> None:
    """Raise if ``torch.utils.checkpoint`` runs this call again in the backward pass, which would add a gradient twice.

    A second run of ``use_reentrant=True`` passes: for operators that add only where gradients are on, it is the first.

    Args:
        name: name of the argument that is added to, for the message.
        operator: name of the public function.
        advice: what to do instead.

    Raises:
        ValueError: the call is inside a checkpoint.
    """
    if torch.compiler.is_compiling():
        return
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == CHECKPOINT and frame.f_code.co_name != "backward":
            raise ValueError(
                f"{name}: expected no {CHECKPOINT} around {operator}: it runs the forward pass twice, and so adds the "
                f"gradient twice; {advice}"
            )
        frame = frame.f_back


def fold_grad_into_main_grad(name: str, weight: torch.Tensor, result: torch.Tensor) -> None:
    """Add the weight's ``.grad``, which other ops wrote, to ``weight.main_grad`` at the end of the backward pass.

    A weight that is tied to an embedding gets one part of its gradient from the head and one from the embedding. The
    embedding's backward writes its part to ``.grad``: at the end of the pass it is added to ``main_grad``, and
    ``.grad`` is set to None. If a hook of the trainer did so earlier, this does nothing. Under torch.compile the part
    stays in ``.grad``.

    Args:
        name: name of the argument, for the message.
        weight: has a ``main_grad``; nothing is done if it is not a leaf.
        result: output of the operator whose backward adds to ``main_grad``.

    Raises:
        RuntimeError: in the backward pass, if ``.grad`` was not None before it and the pass added to it: the parts can
            no longer be told apart.
    """
    if torch.compiler.is_compiling() or result.grad_fn is None or not weight.is_leaf:
        return
    total: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]

    def queue_fold(_: Any) -> None:
        before = weight.grad
        version = None if before is None else before._version

        def fold() -> None:
            grad = weight.grad
            if grad is None or (grad is before and grad._version == version):
                return
            if before is not None:
                raise RuntimeError(
                    f"{name}: this backward pass added to its .grad, which was not None, and to its main_grad; "
                    "set .grad to None first"
                )
            with torch.no_grad():
                total.add_(grad)
            weight.grad = None

        # DDP and FSDP use this too: the callback runs when the pass is done, after the streams of its nodes.
        torch.autograd.Variable._execution_engine.queue_callback(fold)

    result.grad_fn.register_prehook(queue_fold)
    if torch._C._current_graph_task_id() >= 0:
        # A checkpoint with use_reentrant=True runs this pass inside another one, which may add to .grad after it.
        queue_fold(None)
