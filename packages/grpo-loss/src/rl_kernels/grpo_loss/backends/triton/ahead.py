"""Calls that launch every kernel of the backend, without data; ``rl-kernels compile`` compiles what they launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from rl_kernels.core.triton_lib.ahead import empty
from rl_kernels.grpo_loss.backends.triton import backend
from rl_kernels.grpo_loss.call import ESTIMATORS, FORMS, Estimator, Formula, LossCall, Numbers

BATCH, SAMPLES = 64, 8
LENGTHS = (512, 4096)
"""Tokens of a sequence that fits into registers, and of one that does not."""


def calls(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Yield the calls for log-probabilities of a dtype: the default loss, and each kind with all arguments."""
    rewards, bounds = empty(BATCH), empty(BATCH // SAMPLES + 1, dtype=torch.int64)
    for kind in ESTIMATORS:
        text = Estimator(kind, nan="skip").text
        yield partial(
            backend.advantages, rewards, None, SAMPLES, torch.tensor(1e-6, device="cpu"), Estimator(kind).text
        )
        yield partial(backend.advantages, rewards, bounds, 0, torch.tensor(1e-6, device="cpu"), text)
    short, long = (empty(BATCH, length, dtype=dtype) for length in LENGTHS)
    yield partial(backend.forward_grad, *_call(long, Formula()))
    yield partial(backend.sums, *_call(short, Formula())._replace(old_logps=short, ref_logps=short))
    yield partial(backend.backward, long, empty(), empty(*long.shape), empty())
    for level in ("token", "sequence"):
        yield partial(_loss, short, Formula("sapo", level=level))
    # Other dtypes differ in what they load.
    for kind in dict.fromkeys(form.kind for form in FORMS.values()) if dtype == torch.float32 else ("clip",):
        yield partial(_loss, long, Formula(kind, "sequences", "sequence", "k3", "corrected", "mask", "dual"))


def _loss(current: torch.Tensor, formula: Formula) -> None:
    call = _call(current, formula)
    if formula.level == "sequence":
        optional = {"old_logps": current, "ref_logps": current, "rollout_ratio": current, "entropy": current}
        call = LossCall(**{**call._asdict(), **optional, "with_metrics": True})
    backend.forward_grad(*call)


def _call(current: torch.Tensor, formula: Formula) -> LossCall:
    mask = empty(*current.shape, dtype=torch.bool)
    numbers = torch.tensor(Numbers(beta=0.1, length=0.0), dtype=torch.float64, device="cpu")
    return LossCall(
        *(current, None, None, empty(BATCH), None, SAMPLES, None, mask, None, None, None, None, 0),
        *(numbers, formula.text, Estimator().text, False),
    )
