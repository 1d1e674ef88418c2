"""``main_grad``: an FP32 buffer of a weight that backward passes add its gradient to, in place of ``.grad``."""

from __future__ import annotations

from typing import Any

import torch


def gather(name: str, weight: torch.Tensor, result: torch.Tensor) -> None:
    """Let all of a weight's gradient reach ``weight.main_grad``, what other ops leave in ``.grad`` too.

    The weight of a head that is tied to an embedding gets a part of its gradient from each. What the embedding's
    backward put into ``.grad`` is added to ``main_grad`` at the end of the pass, and ``.grad`` is None again; a hook of
    the trainer's that does so earlier leaves nothing to do. Under torch.compile it stays in ``.grad``.

    Args:
        name: of the argument, for the message.
        weight: with a ``main_grad``; a leaf, or nothing is done.
        result: of the operator whose backward adds to ``main_grad``.

    Raises:
        RuntimeError: in the backward pass, if ``.grad`` held something before it and the pass added to that: which part
            belongs where cannot be told.
    """
    if torch.compiler.is_compiling() or result.grad_fn is None or not weight.is_leaf:
        return
    total: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]

    def queue(_: Any) -> None:
        before = weight.grad
        version = None if before is None else before._version

        def end() -> None:
            found = weight.grad
            if found is None or (found is before and found._version == version):
                return
            if before is not None:
                raise RuntimeError(
                    f"{name}: this backward pass added to its .grad, which was not None, and to its main_grad; "
                    "set .grad to None first"
                )
            with torch.no_grad():
                total.add_(found)
            weight.grad = None

        # What DDP and FSDP use: it runs when the pass is done, after the streams of its nodes.
        torch.autograd.Variable._execution_engine.queue_callback(end)

    result.grad_fn.register_prehook(queue)
