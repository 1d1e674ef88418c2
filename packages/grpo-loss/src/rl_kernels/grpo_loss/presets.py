"""Presets: the options of ``Objective``, advantages included, that match a framework or a paper."""

from __future__ import annotations

from typing import Any

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
DAPO = {"clip_low": 0.2, "clip_high": 0.28}
ADDED = {"advantage_estimator": "sample", "eps_placement": "add"}
TRL = {**CLIP, "kl_estimator": "k3", "kl_correction": True, **ADDED, "eps": 1e-4, "skip_nan": True}
"""The defaults of TRL's configuration, which weights the KL by the ratio unless that is turned off."""
VERL = {**CLIP, "kl_estimator": "k3", "kl_correction": False, **ADDED, "eps": 1e-6}
GATES = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}


def _trl(loss_type: str, **options: Any) -> dict[str, Any]:
    return {"loss_type": loss_type, "importance_level": "token", **TRL, **options}


def _trl_types() -> dict[str, dict[str, Any]]:
    """Return TRL's eight loss types and gspo: its configuration defaults, changed as its documentation recommends."""
    return {
        **{name: _trl(name) for name in ("grpo", "bnpo", "dr_grpo", "dapo")},
        "luspo": _trl("luspo", importance_level="sequence"),
        "cispo": _trl("cispo", cispo_cap=5.0),
        "sapo": _trl("sapo", **GATES),
        "vespo": _trl("vespo", **VESPO),
        "gspo": _trl("grpo", importance_level="sequence"),
    }


PRESETS: dict[str, dict[str, Any]] = {
    **{f"trl-{version}:{name}": options for version in ("1.10", "1.16") for name, options in _trl_types().items()},
    "verl:vanilla": {**VERL, "loss_type": "ppo", "dual_clip": 3.0},
    "verl:gspo": {**VERL, "loss_type": "gspo"},
    "verl:cispo": {**VERL, "loss_type": "cispo", "cispo_floor": 0.8, "cispo_cap": 1.2},
    "verl:sapo": {**VERL, "loss_type": "sapo", **GATES},
    "verl:reinforce": {**VERL, "loss_type": "reinforce"},
    "grpo": {**CLIP, "loss_type": "grpo"},
    "bnpo": {**CLIP, "loss_type": "bnpo"},
    "dr_grpo": {**CLIP, "loss_type": "dr_grpo", "advantage_estimator": "none"},
    "dapo": {**DAPO, "loss_type": "dapo"},
    "luspo": {**CLIP, "loss_type": "luspo", "importance_level": "sequence"},
    "cispo": {**CLIP, "loss_type": "cispo", "cispo_cap": 5.0},
    "sapo": {**CLIP, "loss_type": "sapo", **GATES},
    "vespo": {**CLIP, "loss_type": "vespo", **VESPO},
    "gspo": {"loss_type": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    "ppo": {**CLIP, "loss_type": "ppo"},
    "reinforce": {**CLIP, "loss_type": "reinforce"},
}
"""Options of ``Objective`` by preset name."""
