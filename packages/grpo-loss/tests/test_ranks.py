"""grpo_loss over ranks that run in turn in one process: the bits of the whole batch, for each objective and layout."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw, bits_of
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.grpo_loss import Extras, Normalizer, Objective
from rl_kernels.grpo_loss.op import OPERATOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REASON = OPERATOR.backend("triton").why_not(Call.of(torch.zeros(1, device=DEVICE)))
BACKENDS = ["native", pytest.param("triton", marks=pytest.mark.skipif(REASON is not None, reason=str(REASON)))]
PACKAGE = "rl_kernels.grpo_loss"
COPIED = tuple(f"{PACKAGE}.{name}" for name in ("ranks", "loss", "api"))
"""Modules that pass a call on to the ranks, each before those that import it."""
BUG = Bug("sums of this rank only", "batch.gathered(sums)", "sums")
TOKENS = ("current_logps", "old_logps", "ref_logps", "completion_mask")
BATCH, LENGTH = 12, 21
CUTS = ((12,), (6, 6), (0, 12), (1, 6, 0, 5), (2, 1, 1, 3, 2, 1, 1, 1))
ROLLOUT = {"rollout_mode": "truncate", "rollout_max": 1.5, "rollout_min": 0.7}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"beta": 0.1},
    "grpo": {"loss_type": "grpo", "beta": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "luspo": {"loss_type": "luspo", "importance_level": "sequence"},
    "gspo": {"loss_type": "gspo", "beta": 0.1, "kl_correction": True},
    "cispo": {"loss_type": "cispo"},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "ppo": {"loss_type": "ppo", "dual_clip": 1.3},
    "reinforce": {"loss_type": "reinforce", "kl_estimator": "k2", "beta": 0.2},
    "batch": {"advantage_estimator": "batch"},
    "leave one out": {"advantage_estimator": "leave_one_out"},
    "sample": {"advantage_estimator": "sample", "eps_placement": "add", "skip_nan": True},
}


class Pending(Exception):
    """An exchange to which other ranks have not come yet."""


class Group:
    """Ranks that run in turn; after each exchange all run again from the start, with what was exchanged so far."""

    def __init__(self, size: int) -> None:
        self.size, self.rank, self._place = size, 0, 0
        self._sent: list[dict[int, Any]] = []

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        if self._place == len(self._sent):
            self._sent.append({})
        sent = self._sent[self._place]
        self._place += 1
        sent[self.rank] = value
        if len(sent) < self.size:
            raise Pending
        return [sent[rank] for rank in range(self.size)]

    def agree(self, name: str, group: Any, error: Any, same: Any, own: Any = None) -> list[Any]:
        """Compare calls as the real one does, and return what each rank says."""
        sent = self.exchange((error, {key: str(value) for key, value in same.items()}, own))
        assert [one[:2] for one in sent] == [(None, sent[0][1])] * self.size
        return [one[2] for one in sent]

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Return what the function returns on each rank."""
        ranks, results = importlib.import_module(f"{PACKAGE}.ranks"), {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks, "group_of", lambda group, **_: group)
            patch.setattr(ranks, "group_size", lambda group: group.size)
            patch.setattr(ranks, "group_rank", lambda group: group.rank)
            patch.setattr(ranks, "all_gather", lambda x, group: torch.cat(group.exchange(x)))
            patch.setattr(ranks, "agree", self.agree)
            while len(results) < self.size:
                for rank in range(self.size):
                    self.rank, self._place = rank, 0
                    try:
                        results[rank] = function(rank)
                    except Pending:
                        assert not results
        return [results[rank] for rank in range(self.size)]


def drawn(
    length: int = LENGTH, dtype: torch.dtype = torch.float32, batch: int = BATCH, **options: Any
) -> dict[str, Any]:
    draw = Draw(torch.float32, DEVICE, seed=7)
    current = draw.uniform(1e-3, 1.0, batch, length).log()
    old, ref = ((current + draw.normal(batch, length, scale=0.3)).clamp(max=0).to(dtype) for _ in range(2))
    result = {"current_logps": current.to(dtype), "old_logps": old, "ref_logps": ref, "rewards": draw.normal(batch)}
    mask = draw.mask(0.7, batch, length)
    return {**result, "completion_mask": mask, "samples_per_prompt": 4, "objective": Objective(**options)}


def calls() -> dict[str, dict[str, Any]]:
    """Return the arguments of a call for each objective, and for each layout."""
    draw, count = Draw(torch.float32, DEVICE, seed=8), torch.tensor(99.0, device=DEVICE)
    result = {name: drawn(**options) for name, options in OBJECTIVES.items()}
    result["long"] = drawn(4100, batch=4, beta=0.1, loss_type="grpo")
    result["fp64"], result["bf16"] = (drawn(dtype=dtype, beta=0.1) for dtype in (torch.float64, torch.bfloat16))
    result["on policy"] = {**drawn(), "old_logps": None, "ref_logps": None}
    result["tokens counted"] = {**drawn(), "normalizer": Normalizer(num_tokens=count)}
    counted = Normalizer(num_sequences=7, max_completion_length=33)
    result["sequences counted"] = {**drawn(loss_type="dr_grpo"), "normalizer": counted}
    # Of all ranks no token is active, and that is what was counted.
    result["masked"] = {**drawn(loss_type="grpo"), "normalizer": Normalizer(num_sequences=0 * count.long())}
    result["masked"]["completion_mask"] = torch.zeros_like(result["masked"]["completion_mask"])
    extras = Extras(rollout_ratio=draw.uniform(0.5, 2.0, BATCH), entropy=draw.normal(BATCH, LENGTH))
    result["entropy, rollout"] = {**drawn(**ROLLOUT), "extras": extras}
    lengths = torch.tensor([3, 21, 1, 0, 7, 9, 21, 4, 4, 2, 5, 6], device=DEVICE)
    inside, arguments = torch.arange(LENGTH, device=DEVICE) < lengths[:, None], drawn(loss_type="gspo")
    packed = {name: arguments[name][inside] for name in TOKENS}
    result["packed"] = {**arguments, **packed, "cu_seqlens": F.pad(lengths.cumsum(0), (1, 0))}
    return result


CALLS = calls()
INTERPRETED = {"kl", "grpo", "dr_grpo", "gspo", "batch", "long", "masked", "packed"}


def results(call: dict[str, Any], group: Any = None, **options: Any) -> list[torch.Tensor]:
    """Return loss, its parts, the metrics if asked for, and the gradient."""
    current = call["current_logps"].clone().requires_grad_()
    arguments = {**call, **options, "current_logps": current, "process_group": group}
    result = importlib.import_module(f"{PACKAGE}.api").grpo_loss(**arguments)
    output, *metrics = result if options.get("return_metrics") else (result,)
    (output.loss * 3).backward()
    return [*(x.detach() for x in output), *metrics, current.grad]


def part_of(call: dict[str, Any], rank: int, counts: tuple[int, ...], wider: int) -> dict[str, Any]:
    """Return the arguments of a rank, with ``wider`` more columns on the right."""
    first, last = sum(counts[:rank]), sum(counts[: rank + 1])
    rows = tokens = slice(first, last)
    own = {**call, "rewards": call["rewards"][rows]}
    if "cu_seqlens" in call:
        offsets = call["cu_seqlens"][first : last + 1]
        tokens, own["cu_seqlens"] = slice(int(offsets[0]), int(offsets[-1])), offsets - offsets[0]
    own |= {name: None if call[name] is None else call[name][tokens] for name in TOKENS}
    if wider:
        filled = {name: 0 if name == "completion_mask" else torch.nan for name in TOKENS}
        own |= {name: F.pad(own[name], (0, wider), value=filled[name]) for name in TOKENS}
    if "extras" in call:
        own["extras"] = Extras(*(value[rows] for value in call["extras"]))
    return own


def differing(call: dict[str, Any], counts: tuple[int, ...], widths: tuple[int, ...], **options: Any) -> bool:
    """Say whether ranks with ``counts`` sequences have another bit than one process."""
    *expected, grad = results(call, **options)
    group = Group(len(counts))
    result = group.run(
        lambda rank: results(part_of(call, rank, counts, widths[rank % len(widths)]), group=group, **options)
    )
    grads = [one[-1] if one[-1].ndim == 1 else one[-1][:, : grad.shape[-1]] for one in result]
    pairs = [*zip([*(x for one in result for x in one[:-1])], expected * len(counts), strict=True)]
    return not all(same(a, b) for a, b in [*pairs, (torch.cat(grads), grad)])


def same(result: torch.Tensor, expected: torch.Tensor) -> bool:
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    return torch.equal(bits_of(result), bits_of(expected))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_ranks_have_the_bits_of_one_process(name: str, backend: str) -> None:
    if backend == "triton" and name not in (CALLS.keys() - {"fp64"} if DEVICE == "cuda" else INTERPRETED):
        pytest.skip("FP64 runs in native, and in the interpreter one call of each way to sum")
    call, metrics = CALLS[name], {"return_metrics": True}
    cuts, ways = CUTS if len(call["rewards"]) == BATCH else ((1, 2, 0, 1),), ({}, metrics)
    if (backend, DEVICE) == ("triton", "cpu"):
        # The interpreter is slow.
        cuts, ways = cuts[-2:-1] or cuts, ({},) if name in ("plain", "kl") else (metrics,)
    for counts in cuts:
        assert not any(differing(call, counts, (0,), backend=backend, **way) for way in ways)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_may_be_padded_to_other_lengths_or_empty(backend: str) -> None:
    assert not any(differing(CALLS[name], (5, 7), (LENGTH, 0), backend=backend) for name in ("plain", "gspo"))
    call = part_of(CALLS["kl"], 0, (0,), 0)
    assert not differing(call, (0, 0), (0,), backend=backend, return_metrics=True)


def test_longest_rank_is_the_length_of_dr_grpo() -> None:
    """To which one process pads."""
    call, group = CALLS["dr_grpo"], Group(2)
    expected, *_ = results({**call, **{name: F.pad(call[name], (0, 4)) for name in TOKENS}})
    for loss, *_ in group.run(lambda rank: results(part_of(call, rank, (6, 6), 4 * rank), group=group)):
        assert same(loss, expected)


def test_planted_bug_is_caught() -> None:
    with planted(COPIED, BUG), pytest.raises((RuntimeError, ValueError, AssertionError)):
        assert not any(differing(CALLS[name], (1, 6, 0, 5), (0,)) for name in ("grpo", "batch"))
