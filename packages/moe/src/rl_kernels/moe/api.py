"""The public functions of the package; checks are in ``arguments``, gradients in ``autograd``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.main_grad import fold_grad_into_main_grad
from rl_kernels.core.torchlib.autocast import autocast_linear
from rl_kernels.core.torchlib.derivatives import apply_of, no_lost_derivatives
from rl_kernels.moe.arguments import cast, check_bounds, check_ids, main_grad_of, prepare_experts, prepare_route
from rl_kernels.moe.autograd import Experts, Route, RouteSettings, Settings, choose_routes
from rl_kernels.moe.op import ops

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from rl_kernels.core.distributed import Validate


class Routes(NamedTuple):
    """The routes of tokens, as ``route`` returns them.

    Attributes:
        ids: ``[T, k]``, int32: a token's experts, the largest score first.
        weights: ``[T, k]``, FP32; differentiable.
        logits: ``[T, E]``, FP32 or ``logits_dtype``; differentiable, for auxiliary losses.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor


def route(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    correction_bias: torch.Tensor | None = None,
    groups: tuple[int, int] | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    ids: torch.Tensor | None = None,
    validate: bool | None = None,
    backend: str | None = None,
) -> Routes:
    """Choose k experts for each token by the scores of ``hidden @ weight^T + bias``, and return their weights.

    A token's experts, weights and gradient depend on that token and the router alone, bit for bit. Scores are in FP32;
    the largest come first, equal ones by ascending id, which is also the order of the slots. A token whose logits hold
    NaN gets the ids 0 to k - 1 and weights of NaN.

    If ``weight.main_grad`` exists (FP32, ``[E, D]``, any strides), backward adds to it, in place, and the weight gets
    no ``.grad``.

    Args:
        hidden: ``[T, D]``, FP32, BF16 or FP16, any strides; differentiable.
        weight: ``[E, D]`` in the dtype of hidden, any strides; differentiable.
        top_k: number of experts of a token, at most E.
        scoring: ``softmax`` of all logits, as in Mixtral and Qwen3; ``sigmoid``, as in DeepSeek-V3 and GLM-4.5;
            ``softmax_of_chosen``: the largest logits are chosen, and weights are their softmax, as in gpt-oss.
        bias: ``[E]`` in the dtype of hidden, added to the logits before they are rounded; differentiable.
        correction_bias: ``[E]``, FP32, BF16 or FP16, added to the scores for the choice alone; it gets no gradient.
        groups: (n, kept): experts are cut into n groups of neighbors, and the choice is among the ``kept`` groups with
            the largest sums of two scores, equal sums by ascending group, as in DeepSeek-V3.
        normalize: divide the weights by their sum plus 1e-20; always so for ``softmax_of_chosen``.
        scale: a number that multiplies the weights at last.
        logits_dtype: dtype to which the logits are rounded; by default they stay FP32. A model that rounds them to BF16
            has its own choice only so.
        ids: ``[T, k]``, int32 or int64, in ``[0, E)``: routes that were recorded; the choice is left out, and weights
            are formed for these experts.
        validate: check the range of ``ids``, which waits for a GPU; by default only on a CPU. An id out of range that
            is not checked gives its token weights of NaN.
        backend: name of a backend; ``auto`` chooses one; None follows ``use_backend`` and ``RL_KERNELS_BACKEND``, where
            a backend for ``experts`` is one for ``route`` too.

    Under ``torch.autocast`` hidden, weight and bias are first cast to the autocast dtype, as in ``F.linear``.

    Returns:
        ``Routes(ids, weights, logits)``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        RuntimeError: forward-mode AD, a gradient of ``torch.func`` or double backward: not supported. In the backward
            pass: ``weight.grad`` was set before a pass that adds to both it and ``main_grad``.
    """
    router = weight
    hidden, weight, bias = autocast_linear(hidden, weight, bias)
    ready, out_dtype, parts, kept = prepare_route(
        *(hidden, weight, top_k, scoring, bias, correction_bias, groups, normalize, scale, logits_dtype, ids, backend)
    )
    if ids is not None:
        check_ids(ids, weight.shape[0], validate)
    no_lost_derivatives("route", hidden, weight, bias)
    main_grad = getattr(router, "main_grad", None)
    if main_grad is not None:
        check.main_grad("weight.main_grad", main_grad, router)
    settings = RouteSettings(ready, out_dtype, (top_k, parts, kept, scoring, normalize, float(scale)), main_grad)
    arguments = (hidden, weight, bias, correction_bias, ids, settings)
    if not (torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in (hidden, weight, bias)])):
        return Routes(*choose_routes(*arguments))
    routes = Routes(*apply_of(Route, ready)(*arguments))
    if main_grad is not None and router.requires_grad:
        fold_grad_into_main_grad("weight", router, routes.weights)
    return routes


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
    process_group: ProcessGroup | DeviceMesh | None = None,
    num_experts: int | None = None,
    max_tokens: int | None = None,
    validate: Validate | None = None,
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

    With ``process_group`` each rank has the weights and biases of E / ranks consecutive experts, in the order of ranks,
    and its own tokens, any number of them. Rows travel to the ranks of their experts and back, and are summed by slots
    on the token's own rank: outputs and the gradients of hidden and weights have the bits of one GPU that has all
    experts, for any number of ranks. The gradients of an expert's weights are sums over the tokens of all ranks, those
    of rank 0 first: the bits of one GPU with these tokens in this order. All ranks must call it, a rank without tokens
    too; all must run backward, and ask for the gradients of hidden and weights or not, alike. Ranks exchange sizes,
    which this host waits for, unless ``max_tokens`` bounds them.

    Args:
        hidden: ``[T, D]``, FP32, BF16 or FP16, any strides; differentiable.
        gate_up: ``[E, 2F, D]`` in the dtype of hidden, any strides: F rows of the gate, then F of up; differentiable.
            With ``process_group`` those of this rank's experts, as ``down`` and the biases.
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
        process_group: ranks that share the experts: a ``ProcessGroup``, or one dim of a ``DeviceMesh``. None: this
            process has all of them.
        num_experts: E, the experts of all ranks, a multiple of their number; needed in a group of several.
        max_tokens: None, or a number that T of no rank exceeds, the same on all: every exchange then has the size of
            the largest one, ``max_tokens`` rows to each rank and k times as many back, and no call waits for the GPU.
            For decoding, and needed while a CUDA graph is captured.
        validate: check that all ids are in ``[0, E]``, which waits for a GPU; by default only on a CPU. An id out of
            range that is not checked makes its token's output NaN. In a group, unless it is False, the first call of a
            kind (dtypes, sizes but T, options) also compares these over the ranks, by one exchange: an error of one
            rank is then raised on all. ``"ranks"``, or ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, compares every call.
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
    if process_group is not None:
        # Imported here: PyTorch may be built without torch.distributed.
        from rl_kernels.moe.parallel import Options, experts_over_ranks, several

        group = several(process_group)
        if group is not None:
            given = (hidden, gate_up, down, ids, weights, gate_up_bias, down_bias, shared)
            options = Options(
                *(activation, interleaved, transposed, recompute, num_experts, max_tokens, validate, backend)
            )
            return experts_over_ranks(given, group, options)
    buffers = [main_grad_of(name, value, transposed) for name, value in (("gate_up", gate_up), ("down", down))]
    first, second = gate_up, down
    tensors = cast(hidden, gate_up, down, ids, weights, gate_up_bias, down_bias, shared)
    hidden, gate_up, down = tensors[:3]
    needs_grad = torch.is_grad_enabled() and any([getattr(x, "requires_grad", False) for x in tensors])
    check.flag("recompute", recompute)
    keeps = needs_grad and not recompute
    ready = prepare_experts(*tensors, activation, interleaved, transposed, keeps, backend)
    if num_experts is not None or max_tokens is not None:
        check_bounds(num_experts, len(gate_up), max_tokens, len(hidden))
    check_ids(ids, gate_up.shape[0] + 1, validate)
    no_lost_derivatives("experts", *tensors)
    if transposed:
        tensors = (hidden, gate_up.mT, down.mT, *tensors[3:])
    if not needs_grad:
        out: torch.Tensor = ops["forward"].call(ready, *tensors, activation, interleaved)
        return out
    settings = Settings(ready, activation, interleaved, recompute, (buffers[0], buffers[1]))
    out = apply_of(Experts, ready)(*tensors, settings)
    for name, value, buffer in (("gate_up", first, buffers[0]), ("down", second, buffers[1])):
        if buffer is not None and value.requires_grad:
            fold_grad_into_main_grad(name, value, out)
    return out
