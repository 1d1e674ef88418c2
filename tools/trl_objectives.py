"""Compare our loss with TRL's own code on the same tensors: `python tools/trl_objectives.py`, which needs trl 1.16.

TRL's `_compute_loss` runs unchanged, on a trainer that was never initialized. Given log-probabilities replace the
model, so that only the loss is compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from rl_kernels.core.command import Parser, writable, write_json
from rl_kernels.grpo_loss import Extras, grpo_loss_from_advantages
from rl_kernels.lab.bench.environment import environment
from rl_kernels.models.clients import trl as trl_client

TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "KL": {"beta": 0.1, "use_bias_correction_kl": False},
    "corrected KL": {"beta": 0.1},
    "delta": {"delta": 1.3},
    "rollout ratio": {"ratio": "token"},
    "rollout ratio, sequence": {"ratio": "sequence"},
    "all": {"beta": 0.1, "delta": 1.3, "ratio": "token"},
}
LEVELS = ("token", "sequence")
BATCH, LENGTH, STEPS = 8, 33, 4


def trainer_of(loss_type: str, level: str = "token", **options: Any) -> Any:
    """Return a GRPOTrainer without a model, configured for this objective."""
    defaults = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}
    args = SimpleNamespace(**{**defaults, "steps_per_generation": STEPS, **options})
    if loss_type == "cispo":
        args.epsilon_high = 1.3
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    attributes = {
        "args": args,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        "loss_type": loss_type,
        "beta": args.beta,
        "epsilon_low": args.epsilon,
        "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "importance_sampling_level": level,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "use_vllm": "ratio" in options,
        "vllm_importance_sampling_correction": True,
        "max_completion_length": LENGTH,
        "current_gradient_accumulation_steps": STEPS,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda model, *_, **__: (model, torch.zeros_like(model), None),
    }
    vars(trainer).update(attributes)
    return trainer


def batch_of(dtype: torch.dtype, ratio: str | None = None, seed: int = 1) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return log-probabilities and the inputs of a micro-batch, with ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    current = -normal(BATCH, LENGTH).abs()
    lengths = torch.randint(1, LENGTH + 1, (BATCH, 1), generator=generator)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :2],
        "prompt_mask": torch.ones_like(ids[:, :2]),
        "completion_ids": ids,
        "completion_mask": (torch.arange(LENGTH) < lengths).long(),
        "advantages": normal(BATCH),
        "old_per_token_logps": current + normal(BATCH, LENGTH, scale=0.3),
        "ref_per_token_logps": current + normal(BATCH, LENGTH, scale=0.3),
        "num_items_in_batch": torch.tensor(457),
    }
    if ratio is not None:
        ratios = normal(BATCH, LENGTH if ratio == "token" else 1, scale=0.2).exp()
        inputs["importance_sampling_ratio"] = torch.where(inputs["completion_mask"].bool(), ratios, 1.0)[
            :, : ratios.shape[1]
        ]
    return current, inputs


def cells() -> Iterator[tuple[str, str, str]]:
    """Yield every combination of type, level and option that TRL supports."""
    for loss_type in TYPES:
        for level in LEVELS:
            for option, settings in OPTIONS.items():
                if "delta" not in settings or loss_type not in ("cispo", "sapo", "vespo"):
                    yield loss_type, level, option


def difference(loss_type: str, level: str, option: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the differences of loss (as a share of the size of its terms) and gradient (of TRL's largest)."""
    settings = OPTIONS[option]
    trainer = trainer_of(loss_type, level, **settings)
    logps, inputs = batch_of(dtype, settings.get("ratio"))
    results = []
    for loss_of in (GRPOTrainer._compute_loss, trl_client.compute_loss):
        leaf = logps.clone().requires_grad_()
        loss = loss_of(trainer, leaf, inputs)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    (theirs, their_grad), (ours, our_grad) = results
    terms = _size_of_terms(trainer, logps, inputs)
    return float((ours - theirs).abs() / terms), float((our_grad - their_grad).abs().max() / their_grad.abs().max())


def _size_of_terms(trainer: Any, logps: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the sum of the terms' magnitudes over the divisor: rounding errors are a share of it."""
    mask = inputs["completion_mask"].bool()
    lone = {**inputs, "advantages": -inputs["advantages"].abs()}
    tensors = (inputs["old_per_token_logps"], inputs["ref_per_token_logps"], lone["advantages"], mask)
    return grpo_loss_from_advantages(
        logps,
        *tensors,
        objective=trl_client.objective(trainer),
        extras=Extras(rollout_ratio=trl_client.rollout_ratio(trainer, inputs)),
        normalizer=trl_client.normalizer(trainer, inputs, mask),
    ).loss.abs()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the largest differences by type, print them, and with ``--json`` write them."""
    parser = Parser("trl_objectives.py", __doc__.splitlines()[0])
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the results as JSON")
    args = parser.parse_args(argv)
    types: dict[str, dict[str, Any]] = {}
    for loss_type in TYPES:
        mine = [cell for cell in cells() if cell[0] == loss_type]
        types[loss_type] = {"cells": len(mine)}
        for name, dtype in {"fp64": torch.float64, "fp32": torch.float32}.items():
            differences = [difference(*cell, dtype) for cell in mine]
            types[loss_type][name] = [max(values) for values in zip(*differences, strict=True)]
        print(loss_type, types[loss_type], flush=True)
    if args.json:
        write_json(args.json, {"environment": environment(torch.device("cpu"), ("trl",)), "types": types})


if __name__ == "__main__":
    main()
