"""The public function ``experts``; checks are in ``arguments``, gradients in ``autograd``."""

from __future__ import annotations

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.main_grad import fold_grad_into_main_grad
from rl_kernels.core.torchlib.autocast import autocast_linear
from rl_kernels.core.torchlib.derivatives import no_lost_derivatives
from rl_kernels.moe.arguments import check_ids, prepare
from rl_kernels.moe.autograd import Experts, Settings
from rl_kernels.moe.op import ops


def experts(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    transposed: bool = False,
    recompute: bool = False,
    validate: bool | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return ``sum_s weights[t, s] * expert(ids[t, s])(hidden[t]) + shared[t]`` for each token t.

    An expert is ``down[e] @ activation(gate_up[e] @ x)``. A token's output and its gradients depend on that token, its
    routes and their experts alone, bit for bit: not on the batch, its order, or how many tokens an expert gets. Each
    product of a route has the bits of ``det_linear`` of that row with that expert's weight. The gradient of an expert's
    weight is a sum over its routes in token order, 16 routes per step, so other experts and tokens that chose none of
    it change no bit of it. Nothing is dropped, and no call waits for the GPU.

    If ``gate_up.main_grad`` or ``down.main_grad`` exists (FP32, shape of the weight, any strides), backward adds to it,
    in place, and that weight gets no ``.grad``.

    Args:
        hidden: ``[T, D]``, FP32, BF16 or FP16, any strides; differentiable.
        gate_up: ``[E, 2F, D]`` in the dtype of hidden, any strides: F rows of the gate, then F of up; differentiable.
        down: ``[E, D, F]`` in the dtype of hidden, any strides; differentiable.
        ids: ``[T, k]``, int32 or int64: the expert of each slot, in ``[0, E)``; E stands for an expert that is not
            here, and adds nothing.
        weights: ``[T, k]``, FP32, BF16 or FP16; differentiable.
        gate_up_bias: ``[E, 2F]`` in the dtype of hidden, added before the first product is rounded; differentiable.
        down_bias: ``[E, D]`` in the dtype of hidden, added before the second product is rounded; differentiable.
        shared: ``[T, D]`` in the dtype of hidden, such as a shared expert's output; added last; differentiable.
        activation: ``silu`` or ``gelu_tanh``: ``act(gate) * up``; ``clamped_swiglu``: gate up to 7 and up in [-7, 7],
            ``(up + 1) * gate * sigmoid(1.702 gate)``, as in gpt-oss.
        interleaved: rows of gate and up alternate in ``gate_up`` and its bias, as in gpt-oss.
        transposed: the weights are ``gate_up[E, D, 2F]`` and ``down[E, F, D]``; they are read in place.
        recompute: save no ``[T k, 2F]`` for backward, which then computes the first product again; changes no bit.
        validate: check that all ids are in ``[0, E]``, which waits for a GPU; by default only on a CPU. An id out of
            range that is not checked makes its token's output NaN.
        backend: name of a backend; ``auto`` chooses one; None follows ``use_backend`` and ``RL_KERNELS_BACKEND``, and
            chooses one if neither is set.

    Under ``torch.autocast`` all operands but ids and weights are first cast to the autocast dtype.

    Returns:
        ``[T, D]`` in the dtype of the operands.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        RuntimeError: forward-mode AD, a gradient of ``torch.func`` or double backward: not supported. In the backward
            pass: a weight's ``.grad`` was set before a pass that adds to both it and ``main_grad``.
    """
    buffers = [_main_grad(name, value, transposed) for name, value in (("gate_up", gate_up), ("down", down))]
    first, second = gate_up, down
    hidden, gate_up, gate_up_bias = autocast_linear(hidden, gate_up, gate_up_bias)
    # hidden has the autocast dtype by now: it stands for a shared[T, D] that is not there.
    last, down, down_bias = autocast_linear(hidden if shared is None else shared, down, down_bias)
    shared = None if shared is None else last
    inputs = (hidden, gate_up, down, weights, gate_up_bias, down_bias, shared)
    needs_grad = torch.is_grad_enabled() and any([x is not None and getattr(x, "requires_grad", False) for x in inputs])
    check.flag("recompute", recompute)
    keeps = needs_grad and not recompute
    form = (gate_up_bias, down_bias, shared, activation, interleaved)
    ready = prepare(hidden, gate_up, down, ids, weights, *form, transposed, keeps, backend)
    check_ids(ids, gate_up.shape[0], validate)
    no_lost_derivatives("experts", *inputs)
    if transposed:
        gate_up, down = gate_up.mT, down.mT
    if not needs_grad:
        out: torch.Tensor = ops["forward"].call(ready, hidden, gate_up, down, ids, weights, *form)
        return out
    settings = Settings(ready, activation, interleaved, recompute, (buffers[0], buffers[1]))
    out = Experts.apply(hidden, gate_up, down, weights, gate_up_bias, down_bias, shared, ids, settings)
    for name, value, buffer in (("gate_up", first, buffers[0]), ("down", second, buffers[1])):
        if buffer is not None and value.requires_grad:
            fold_grad_into_main_grad(name, value, out)
    return out


def _main_grad(name: str, weight: torch.Tensor, transposed: bool) -> torch.Tensor | None:
    """Return the buffer of a weight in the layout of the raw ops, checked, or None."""
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return None
    check.main_grad(f"{name}.main_grad", buffer, weight)
    return buffer.mT if transposed else buffer
