"""Read the log-probs that another stack recorded: TRL, verl, vLLM or your own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rl_kernels.models.rollouts.samples import Sample

IDS, VALUES = ("prompt_ids", "completion_ids"), "logprobs"
"""Fields of a line, under the names that TRL's ``rollout_func`` returns."""


def read(path: Path) -> list[Sample]:
    """Return the samples of a file of JSON lines, each an object with the fields ``IDS`` and ``VALUES``.

    Raises:
        ValueError: the file cannot be read, holds no line, or a line is not such an object; the message says which.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"recorded: cannot read {path}: {error}") from error
    samples = [_sample(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not samples:
        raise ValueError(f"recorded: {path} has no lines")
    return samples


def _sample(line: str, where: str) -> Sample:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"recorded: {where}: no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"recorded: {where}: expected an object with {', '.join((*IDS, VALUES))}")
    prompt, completion = (_numbers(fields, name, int, where) for name in IDS)
    values = _numbers(fields, VALUES, (int, float), where)
    if len(values) != len(completion):
        raise ValueError(f"recorded: {where}: {VALUES}: expected {len(completion)}, one a token, got {len(values)}")
    before, after = (torch.tensor(numbers, device="cpu") for numbers in (prompt, completion))
    return Sample(before, after, torch.tensor(values, dtype=torch.float32, device="cpu"))


def _numbers(fields: dict[str, Any], name: str, kind: Any, where: str) -> list[Any]:
    values = fields.get(name)
    is_list = isinstance(values, list) and bool(values)
    if not is_list or not all(isinstance(value, kind) and not isinstance(value, bool) for value in values or ()):
        raise ValueError(f"recorded: {where}: {name}: expected a list of numbers that is not empty")
    assert isinstance(values, list)
    return values
