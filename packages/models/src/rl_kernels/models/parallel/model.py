"""``parallelize(model, mesh)``: cut a model over ranks, with the bits of one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rl_kernels.core.distributed import Validate, agree, agree_on_kind, all_gather, fingerprint, group_of, split
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.models.invariance import invariant
from rl_kernels.models.parallel.plan import Plan, plan_of
from rl_kernels.models.parallel.ranks import TOKENS, Ranks
from rl_kernels.models.swap import original_of

INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
"""Arguments of a forward pass that all ranks must share."""
PARTS = "_rl_kernels_parts"
"""Attribute of a parallel model's body: (parent, name, module) of each module that was changed."""
_models = itertools.count()
"""Numbers the models of a process: the inputs of each model's first forward pass are compared over ranks."""


class Parallel(NamedTuple):
    """Result of ``parallelize``.

    Attributes:
        styles: names of the changed modules -> names of their styles.
        left: modules that may depend on the batch, as in ``Invariance``.
        ranks: the number of ranks.
        segments: number of segments of each sum over a dim that is cut.
    """

    styles: Mapping[str, str]
    left: Mapping[str, str]
    ranks: int
    segments: int


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | ProcessGroup | None = None,
    *,
    sequence_parallel: bool = False,
    segments: int = 8,
    strict: bool = False,
    validate: Validate = True,
) -> Parallel:
    """Cut a model of transformers over ranks: its outputs and gradients have the same bits for 1, 2, 4 and 8 ranks.

    The model becomes batch-invariant too, as by ``invariant(model)``, and stays so. Modules are changed in place:

    - q_proj, k_proj, v_proj, gate_proj and up_proj keep this rank's outputs, o_proj and down_proj its inputs: what the
      model's own ``base_model_tp_plan`` calls colwise and rowwise. Attention runs on this rank's heads.
    - The vocabulary of the head is cut by ``vocab_shards``. ``model(...)`` returns all logits on each rank, and
      ``head_logp(model.lm_head, ...)`` materializes none. A head tied to the embedding stays whole.
    - Embeddings and norms stay whole on each rank.

    A sum over a dim that is cut has ``segments`` parts, added by a balanced binary tree, whatever the number of ranks.
    So it has the bits of ``parallelize(model)`` in one process, and other bits than ``invariant(model)``.

    Call it with the same weights on each rank, before an optimizer, ``main_grad`` buffers, FSDP2 or DDP are made.
    A gradient belongs to this rank's part of a weight, and so does the state of an optimizer: save that on each rank.
    ``full_state_dict`` gathers whole weights and ``load_full_state_dict`` loads them; ``state_dict`` of a model that is
    cut, and all that saves through it, raises and names them. So does a forward pass once a layer was replaced.

    Args:
        model: a ``PreTrainedModel`` with Llama's layout: Llama, Qwen2, Qwen3, Mistral and others.
        mesh: the ranks of tensor parallelism: a mesh with one dim, as ``mesh["tp"]``, or a group; None is one process.
        sequence_parallel: cut tokens too, between attention and MLP, if the number of ranks divides their number:
            activations there take 1 / ranks of the memory. It changes no bit.
        segments: 2, 4 or 8, at least the number of ranks. Compare models with the same number.
        strict: as in ``invariant``.
        validate: compare weights on all ranks now, and the inputs of the first forward pass: an exchange of 4 KiB, and
            a sync of the GPU. ``"ranks"``, or ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, compares the inputs of every forward
            pass. Skipped under torch.compile and while a CUDA graph is captured.

    Returns:
        what was cut. It cannot be undone.

    Raises:
        TypeError, ValueError: the model or the mesh does not fit, or ranks differ; each rank raises the same error.
        BackendUnavailable, CanaryMismatch: as in ``invariant``.
    """
    group = None if mesh is None else group_of(mesh, "mesh")
    error: Exception | None = None
    ranks, plan, handle = None, None, None
    try:
        ranks = Ranks(group, segments, sequence_parallel)
        plan = plan_of(model, ranks)
        _check_styles(model, plan, ranks)
        handle = invariant(model, strict=strict)
    except (TypeError, ValueError, RuntimeError) as raised:
        error = raised
    try:
        if group is not None and validate:
            weights = _weights_fingerprint(model) if error is None else ""
            compared = {"segments": segments, "sequence_parallel": sequence_parallel, "weights of model": weights}
            agree("parallelize", group, error, compared)
        elif error is not None:
            raise error
    except BaseException:
        if handle is not None:
            handle.undo()
        raise
    assert ranks is not None
    assert plan is not None
    assert handle is not None
    for name, style in plan.styles.items():
        style.apply(model.get_submodule(name))
    paths = [name.rpartition(".") for name in plan.styles]
    parts = [
        (model.get_submodule(parent), name, model.get_submodule(parent + dot + name)) for parent, dot, name in paths
    ]
    setattr(plan.body, PARTS, parts)
    _register_hooks(plan, ranks, validate)
    return Parallel(
        {name: type(style).__name__ for name, style in plan.styles.items()}, dict(handle.left), ranks.size, segments
    )


def _check_styles(model: nn.Module, plan: Plan, ranks: Ranks) -> None:
    """Check all modules before the first is changed."""
    for name, style in plan.styles.items():
        try:
            style.check(model.get_submodule(name), ranks)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error


def _weights_fingerprint(model: nn.Module) -> str:
    values = enumerate(value for value in model.parameters() if not value.is_meta)
    return f"{sum(fingerprint(value) * (2 * place + 1) for place, value in values) % (1 << 64):016x}"


def _register_hooks(plan: Plan, ranks: Ranks, validate: Validate) -> None:
    if ranks.group is None:
        return
    plan.body.register_forward_pre_hook(_check_parts)
    if validate:
        plan.body.register_forward_pre_hook(partial(_check_inputs, ranks, validate, next(_models)), with_kwargs=True)
    if not ranks.cuts_tokens:
        return
    group = ranks.group

    def split_tokens(module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        # One new token cannot be cut: then only tensor parallelism exchanges data, with the same bits.
        ranks.tokens_cut = hidden.shape[TOKENS] % ranks.size == 0
        return _replace_hidden(args, kwargs, split(hidden, group, TOKENS)) if ranks.tokens_cut else None

    def gather_tokens(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (
            _replace_hidden(args, kwargs, all_gather(_hidden(args, kwargs), group, TOKENS))
            if ranks.tokens_cut
            else None
        )

    def gather_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not ranks.tokens_cut:
            return output
        return all_gather(output, group, TOKENS)

    plan.first.register_forward_pre_hook(split_tokens, with_kwargs=True)
    for block in plan.blocks:
        block.register_forward_pre_hook(gather_tokens, with_kwargs=True)
    plan.last.register_forward_hook(gather_output)


def _check_parts(body: nn.Module, args: Any) -> None:
    """Refuse layers that replaced a cut layer, such as adapters: ranks would compute different things."""
    if torch.compiler.is_compiling():
        return
    for parent, name, part in getattr(body, PARTS):
        current = parent._modules.get(name)
        if current is not part:
            kind = type(current) if current is None else original_of(current)
            named = f"{kind.__module__}.{kind.__qualname__}"
            raise TypeError(f"parallelize: expected {name} as it was cut, found {named}; change layers before the cut")


def _hidden(args: Any, kwargs: Any) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _replace_hidden(args: Any, kwargs: Any, hidden: torch.Tensor) -> Any:
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def _check_inputs(ranks: Ranks, validate: Validate, number: int, body: nn.Module, args: Any, kwargs: Any) -> None:
    arguments = {**dict(zip(INPUTS[:1], args, strict=False)), **kwargs}
    tensors = {name: arguments[name] for name in INPUTS if isinstance(arguments.get(name), torch.Tensor)}
    if any(values_hidden(value) for value in tensors.values()):
        return
    assert ranks.group is not None

    def same() -> dict[str, object]:
        return {name: (tuple(x.shape), str(x.dtype), fingerprint(x)) for name, x in tensors.items()}

    agree_on_kind(f"forward of {type(body).__name__}", ranks.group, validate, ("forward", number), None, same)
