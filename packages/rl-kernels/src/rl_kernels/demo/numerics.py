"""The four ways to compute that the demo compares: two arithmetics, each in FP32 and in BF16."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from rl_kernels.demo.arithmetic import Arithmetic
from rl_kernels.demo.invariant import INVARIANT
from rl_kernels.demo.model import Policy
from rl_kernels.demo.plain import PLAIN


@dataclass(frozen=True)
class Numerics:
    """An arithmetic, and the copy of a policy that it runs on.

    Attributes:
        name: as reports call it.
        arithmetic: computes; activations have the dtype of the weights, log-probabilities are FP32.
        weights: returns the policy itself, or a copy with its weights rounded.
    """

    name: str
    arithmetic: Arithmetic
    weights: Callable[[Policy], Policy]


def as_trained(policy: Policy) -> Policy:
    """Return the policy itself, whose weights are FP32."""
    return policy


def in_bf16(policy: Policy) -> Policy:
    """Return a BF16 copy of a policy, for passes without a gradient."""
    return copy.deepcopy(policy).requires_grad_(False).bfloat16()


OURS_FP32 = Numerics(f"{INVARIANT.name}, FP32", INVARIANT, as_trained)
OURS_BF16 = Numerics(f"{INVARIANT.name}, BF16", INVARIANT, in_bf16)
PLAIN_FP32 = Numerics(f"{PLAIN.name}, FP32", PLAIN, as_trained)
PLAIN_BF16 = Numerics(f"{PLAIN.name}, BF16", PLAIN, in_bf16)
