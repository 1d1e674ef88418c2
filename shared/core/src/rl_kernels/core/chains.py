"""The length of the chains that sums over tokens are cut into, the option ``join_tokens`` of operators.

On Hopper tensor cores truncate when they accumulate, so a long sum is biased towards zero. Therefore the rows of a call
are cut into parts of ``join_tokens``. Each part is a chain from 0, and is added to the sum of the parts before it,
rounded to nearest.
"""

from __future__ import annotations

from rl_kernels.core import validate as check
from rl_kernels.core.constants import STEP


def validate(join_tokens: int | None) -> None:
    """Require None, or a positive multiple of 16 rows.

    Raises:
        TypeError, ValueError: ``join_tokens`` is not as above.
    """
    if join_tokens is None:
        return
    check.integer("join_tokens", join_tokens)
    if join_tokens < STEP or join_tokens % STEP:
        raise ValueError(f"join_tokens: expected None or a multiple of {STEP} rows, at least {STEP}, got {join_tokens}")
