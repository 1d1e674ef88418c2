"""The models of `model_step.py`: one model with random weights run in several ways, and ways to batch prompts."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from rl_kernels.core.contract import DTYPES
from rl_kernels.models import invariant

STOCK, COMPILED, LIGER = "stock", "stock, compiled", "Liger"
OURS, OURS_COMPILED = "invariant", "invariant, compiled"
ROTARY = "apply_rotary_pos_emb"
HYBRIDS = ("Qwen3_5", "Qwen3_5Moe")


def model_of(args: argparse.Namespace) -> Any:
    """Return a model of the family, the same for the same seed; transformers stays offline."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    mixture = {"num_experts_per_tok": args.chosen, "head_dim": args.head}
    own = {
        "Llama": {},
        "Qwen3Moe": mixture
        | {"num_experts": args.experts, "moe_intermediate_size": args.between, "norm_topk_prob": True},
        "GptOss": mixture | {"num_local_experts": args.experts},
        "Qwen3_5": {"head_dim": args.head},
        "Qwen3_5Moe": mixture
        | {"num_experts": args.experts, "moe_intermediate_size": args.between}
        | {"shared_expert_intermediate_size": args.between},
    }
    text = "Text" if args.family in HYBRIDS else ""
    config = getattr(transformers, f"{args.family}{text}Config")(
        **own[args.family],
        hidden_size=args.hidden,
        intermediate_size=args.between,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        vocab_size=args.vocab,
        max_position_embeddings=1 << 17,
        # SDPA has no sinks.
        attn_implementation="eager" if args.family == "GptOss" else "sdpa",
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        return getattr(transformers, f"{args.family}ForCausalLM")(config).to(DTYPES[args.dtype]).eval()


class Way:
    """One way to run the model, inside the context manager ``active``."""

    def __init__(self, name: str, model: Any, rotary: Any, *, compiled: bool = False) -> None:
        self.name, self.model, self._rotary = name, model, rotary
        self.body = torch.compile(model.model) if compiled else model.model

    @contextmanager
    def active(self) -> Iterator[Way]:
        """Install the rotary embedding of this way in the model's module until the block ends."""
        file = modeling_file(self.model)
        before = getattr(file, ROTARY)
        setattr(file, ROTARY, self._rotary)
        try:
            yield self
        finally:
            setattr(file, ROTARY, before)

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states."""
        hidden: torch.Tensor = self.body(ids, use_cache=False).last_hidden_state
        return hidden

    def both(self, ids: torch.Tensor, upstream: torch.Tensor) -> None:
        """Run forward and backward with new gradients."""
        self.model.zero_grad(set_to_none=True)
        self.body(ids, use_cache=False).last_hidden_state.backward(upstream)


def modeling_file(model: Any) -> Any:
    """Return transformers' module of a model, which has its rotary embedding."""
    return sys.modules[type(model).__module__]


@contextmanager
def ways(args: argparse.Namespace) -> Iterator[list[Way]]:
    """Yield the ways that can run here; all have the same weights."""
    stock = model_of(args)
    file = modeling_file(stock)
    own = getattr(file, ROTARY)
    result = [Way(STOCK, stock, own)]
    if args.compile:
        result.append(Way(COMPILED, copy.deepcopy(stock), own, compiled=True))
    if find_spec("liger_kernel") is not None and args.family == "Llama":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        other = copy.deepcopy(stock)
        options = {"rope": True, "swiglu": True, "rms_norm": True, "cross_entropy": False}
        apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, model=other, **options)
        result.append(Way(LIGER, other, getattr(file, ROTARY)))
        setattr(file, ROTARY, own)
    with ExitStack() as stack:
        for name, compiled in ((OURS, False), (OURS_COMPILED, True))[: 1 + args.compile]:
            ours = copy.deepcopy(stock)
            stack.enter_context(invariant(ours, strict=True))
            result.append(Way(name, ours, getattr(file, ROTARY), compiled=compiled))
        yield result


def layer_profile(way: Way, ids: torch.Tensor) -> dict[str, float]:
    """Return the milliseconds of device time of a layer's parts in a forward pass.

    ``rest`` is the time of the layer outside of its attention, MLP and norms, such as residuals.
    """
    marks: list[tuple[str, Any, Any]] = []
    handles = []

    def watch(name: str, module: Any) -> None:
        begun: list[Any] = []

        def before(*_: Any) -> None:
            begun.append(_event())

        def after(*_: Any) -> None:
            marks.append((name, begun.pop(), _event()))

        handles.extend((module.register_forward_pre_hook(before), module.register_forward_hook(after)))

    for layer in way.model.model.layers:
        watch("layer", layer)
        for name, module in layer.named_modules():
            if name.endswith("_proj"):
                watch("products", module)
            elif "norm" in name:
                watch("norms", module)
            elif name in ("self_attn", "linear_attn", "mlp"):
                watch("inside", module)
    try:
        for _ in range(3):
            marks.clear()
            way.forward(ids)
        torch.cuda.synchronize()
    finally:
        for handle in handles:
            handle.remove()
    spent: dict[str, float] = {}
    for name, begin, end in marks:
        spent[name] = spent.get(name, 0.0) + begin.elapsed_time(end) / len(way.model.model.layers)
    inside, layer = spent.pop("inside"), spent.pop("layer")
    spent["attention, rotary, gate"] = inside - spent["products"]
    spent["rest"] = layer - inside - spent["norms"]
    return {"layer": layer, **spent}


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
