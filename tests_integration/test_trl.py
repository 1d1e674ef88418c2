"""A real client: TRL's GRPOTrainer with our loss, beside TRL's own on the same tensors and through some steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import imported

trl = pytest.importorskip("trl")
# TRL and its libraries warn of what does not concern this.
pytestmark = pytest.mark.filterwarnings("ignore")

from rl_kernels.grpo_loss import Objective  # noqa: E402
from rl_kernels.models.clients import trl as trl_client  # noqa: E402

ROOT = Path(__file__).parents[1]
Made = Callable[..., Any]
tool = imported("trl_objectives")


@pytest.mark.parametrize("loss_type", tool.TYPES)
def test_loss_and_gradient_are_those_of_trl(loss_type: str) -> None:
    # TRL rounds the temperatures of sapo to FP32, whatever the dtype.
    exact = 1e-7 if loss_type == "sapo" else 1e-14
    for cell in tool.cells():
        if cell[0] == loss_type:
            assert max(tool.difference(*cell, torch.float64)) < exact, cell
            assert max(tool.difference(*cell, torch.float32)) < 1e-6, cell


def test_the_table_of_the_page_is_of_these_types() -> None:
    page = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
    text = page.split("<!-- differences -->")[1].split("<!-- end of differences -->")[0]
    assert all(f"| `{name}` | " in text for name in tool.TYPES)


@pytest.mark.parametrize("loss_type", tool.TYPES)
def test_preset_is_the_default_configuration(loss_type: str) -> None:
    found = dict(vars(trl_client.objective(tool.trainer_of(loss_type))))
    made = vars(Objective.preset(f"trl-1.16:{loss_type}"))
    # Advantages come from TRL itself; what follows from the options is theirs again.
    for name in ("advantage_estimator", "eps", "eps_placement", "skip_nan", "plan", "numbers", "estimator"):
        del found[name]
    # What TRL's documentation says to change from its defaults, for these two.
    for name in {"luspo": ("importance_level",), "cispo": ("cispo_cap", "clip_high")}.get(loss_type, ()):
        del found[name]
    assert {name: made[name] for name in found} == found


@pytest.mark.parametrize("loss_type", [name for name in tool.TYPES if name != "bnpo"])
def test_split_of_a_batch_changes_no_bit_of_its_gradient(loss_type: str) -> None:
    logps, inputs = tool.batch_of(torch.float32)
    trainer, grads, losses = tool.trainer_of(loss_type, beta=0.1), [], []
    for size in (1, 2, 4, 8):
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = tool.BATCH // size
        parts = []
        for i in range(0, tool.BATCH, size):
            part = {name: value[i : i + size] if value.ndim else value for name, value in inputs.items()}
            leaf = logps[i : i + size].clone().requires_grad_()
            loss = trl_client.compute_loss(trainer, leaf, part)
            parts.append(torch.autograd.grad(loss, leaf)[0])
            losses.append(float(loss.detach()) * size / tool.BATCH)
        grads.append(torch.cat(parts))
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def _without_tools(trainer: Any, inputs: dict[str, Any]) -> None:
    shape = inputs["completion_mask"].shape
    inputs["tool_mask"] = (torch.arange(shape.numel()).view(shape) % 3 > 0).long()
    entropy = torch.linspace(0, 1, shape.numel(), dtype=torch.float64).view(shape)
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (model, entropy, None)


CASES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "tokens of tools": _without_tools,
    "an evaluation": lambda trainer, _: setattr(trainer.model, "training", False),
    "three processes": lambda trainer, _: setattr(trainer.accelerator, "num_processes", 3),
    "longer completions": lambda trainer, _: setattr(trainer, "max_completion_length", 50),
    "a delta": lambda trainer, _: setattr(trainer.args, "delta", 1.3),
    "a completion without tokens": lambda _, inputs: inputs["completion_mask"][2].zero_(),
    "no token": lambda _, inputs: (inputs["completion_mask"].zero_(), inputs["num_items_in_batch"].zero_()),
    "a ratio": lambda _, inputs: inputs.update(tool.batch_of(torch.float64, "token")[1]),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_of_other_batches_are_those_of_trl(case: str) -> None:
    for loss_type in tool.TYPES:
        # TRL rounds the temperatures of sapo, and what it divides by over processes, to FP32.
        rounds = loss_type == "sapo" or case == "three processes"
        found, near = [], {"rtol": 1e-6 if rounds else 1e-7, "atol": 1e-12}
        for loss_of in (tool.GRPOTrainer._compute_loss, trl_client.compute_loss):
            trainer, (logps, inputs) = tool.trainer_of(loss_type, beta=0.1), tool.batch_of(torch.float64)
            CASES[case](trainer, inputs)
            leaf = logps.clone().requires_grad_()
            loss = loss_of(trainer, leaf, inputs)
            metrics = {(mode, name): values for mode, part in trainer._metrics.items() for name, values in part.items()}
            found.append(({"loss": [loss.item()], **metrics}, *torch.autograd.grad(loss, leaf)))
        (their_numbers, their_grad), (our_numbers, our_grad) = found
        torch.testing.assert_close(our_grad, their_grad, **near)
        assert our_numbers.keys() == their_numbers.keys()
        for name, values in their_numbers.items():
            told = f"{loss_type}: {name}"
            torch.testing.assert_close(our_numbers[name], values, **near, equal_nan=True, msg=told)


def test_how_far_tokens_are_from_what_was_sampled_is_logged_once() -> None:
    """From old log-probabilities where there are some. Where vLLM samples, TRL logs it."""
    logps, inputs = tool.batch_of(torch.float64)
    inputs["tool_mask"] = (torch.arange(logps.numel()).view(logps.shape) % 3 > 0).long()
    mask, old = (inputs["completion_mask"] * inputs["tool_mask"]).bool(), inputs["old_per_token_logps"]
    inputs["sampling_per_token_logps"] = torch.where(mask, logps + old, 0.0)
    for first in (old, None):
        trainer = tool.trainer_of("dapo")
        trl_client.compute_loss(trainer, logps, {**inputs, "old_per_token_logps": first})
        away = (logps if first is not None else old).abs()[mask]
        for name, value in (("mean", away.mean()), ("max", away.max())):
            (found,) = trainer._metrics["train"][f"sampling/sampling_logp_difference/{name}"]
            assert found == pytest.approx(value.item())
    trainer = tool.trainer_of("dapo")
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, False
    trl_client.compute_loss(trainer, logps, inputs)
    assert not any(name.startswith("sampling") for name in trainer._metrics["train"])


def test_images_reach_the_model() -> None:
    logps, inputs = tool.batch_of(torch.float32)
    inputs |= {"pixel_values": torch.rand(2, 3), "image_sizes": torch.tensor([[1, 2]])}
    given = {}

    def scores(model: Any, *_: Any, **options: Any) -> Any:
        given.update(options)
        return model, torch.zeros_like(model), None

    trainer = tool.trainer_of("dapo")
    trainer._get_per_token_logps_and_entropies = scores
    trl_client.compute_loss(trainer, logps, inputs)
    assert all(given[name] is inputs[name] for name in ("pixel_values", "image_sizes"))
    assert "num_tiles" not in given


def test_a_term_that_our_loss_has_not_is_refused() -> None:
    terms: list[tuple[str, str, object]] = [
        ("top_entropy_quantile", "top_entropy_quantile", 0.8),
        ("off_policy_mask_threshold", "off_policy_mask_threshold", 0.0),
        ("entropy_coef", "_entropy_bonus_enabled", True),
        ("router_aux_loss_coef", "aux_loss_enabled", True),
    ]
    for name, attribute, value in terms:
        trainer = tool.trainer_of("grpo")
        setattr(trainer, attribute, value)
        with pytest.raises(ValueError, match=f"^{name}: expected a trainer without it"):
            trl_client.use_in(trainer)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"loss_type": "grpo", "beta": 0.1, "importance_sampling_level": "sequence"},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "vespo", "temperature": 0.7},
        {"loss_type": "bnpo", "delta": 1.1, "cast_lm_head_to_fp32": True},
    ],
    ids=lambda options: options["loss_type"],
)
def test_training_steps_are_those_of_trl(trainer_of: Made, options: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **options)
    names = ("model", "ref_model")
    models = [getattr(trainer, name) for name in names if getattr(trainer, name) is not None]
    theirs, heads = trainer._compute_loss, [model.forward for model in models]
    trl_client.use_in(trainer)
    ours, our_heads = trainer._compute_loss, [model.forward for model in models]
    pairs, advantages, metrics = [], [], []

    def both(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        parameters = [value for value in model.parameters() if value.requires_grad]
        losses, logged = [], []
        for function, forwards in ((theirs, heads), (ours, our_heads)):
            trainer._metrics["train"].clear()
            for each, forward in zip(models, forwards, strict=True):
                each.forward = forward
            losses.append(function(model, inputs))
            logged.append({name: list(values) for name, values in trainer._metrics["train"].items()})
        grads = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        pairs.append((losses, grads))
        metrics.append(logged)
        advantages.append(inputs["advantages"].abs().max())
        return losses[1]

    trainer._compute_loss = both
    before = [value.detach().clone() for value in trainer.model.parameters()]
    trainer.train()
    assert len(pairs) == 2 * trainer.args.max_steps
    assert max(advantages) > 0.1
    for (their_loss, our_loss), (their_grads, our_grads) in pairs:
        torch.testing.assert_close(our_loss, their_loss, rtol=1e-5, atol=1e-6)
        size = max(float(grad.abs().max()) for grad in their_grads)
        for found, expected in zip(our_grads, their_grads, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6 * max(size, 1e-3))
    for their_metrics, our_metrics in metrics:
        assert our_metrics.keys() == their_metrics.keys()
        for name, values in their_metrics.items():
            torch.testing.assert_close(our_metrics[name], values, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_what_is_not_computed_is_refused_by_name(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    del trainer.model.forward
    with pytest.raises(TypeError, match=r"^trainer: expected TRL's GRPOTrainer with a fused head .* TRL 1\.16"):
        trl_client.use_in(trainer)


def test_the_reference_is_scored_through_its_own_head(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, beta=0.1)
    with torch.no_grad():
        trainer.ref_model.lm_head.weight.neg_()
    ids = torch.arange(12).view(2, 6) + 3
    given = (trainer.ref_model, ids, torch.ones_like(ids), 4)
    expected, *_ = trainer._get_per_token_logps_and_entropies(*given)
    trl_client.use_in(trainer)
    found, *_ = trainer._get_per_token_logps_and_entropies(*given)
    torch.testing.assert_close(found, expected)


def test_options_reach_the_loss(trainer_of: Made, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trl_client.use_in(trainer, backend="abacus")
    with pytest.raises(ValueError, match="abacus"):
        trainer.train()
