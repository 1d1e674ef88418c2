"""The checks of a call's arguments that need no values, and the choice of its backend."""

from __future__ import annotations

from rl_kernels.attention import checks
from rl_kernels.attention.inputs import Inputs
from rl_kernels.attention.op import OPERATOR, describe
from rl_kernels.core import validate as check
from rl_kernels.core.dispatch import choose


def choose_backend(call: Inputs, backend: str | None) -> tuple[str, Inputs]:
    """Check all arguments but the window and the values of tensors; return a backend's name and the raw ops' arguments.

    In ``call`` the lengths and the scale may be None: the largest possible lengths, and ``1 / sqrt(D)``.
    """
    checks.heads(call)
    checks.layout(call)
    q, k, v = call.operands
    if call.scale is not None:
        check.number("scale", call.scale, above=0)
    check.number("softcap", call.softcap, least=0)
    check.backend_name(backend)
    name = choose(OPERATOR, describe(q, k, v), backend).name
    most_q = q.shape[0] if call.cu_seqlens_q is not None else q.shape[1]
    most_k = k.shape[0] if call.cu_seqlens_k is not None else k.shape[1]
    if call.block_table is not None:
        most_k *= call.block_table.shape[1]
    return name, call._replace(
        max_seqlen_q=checks.at_most("max_seqlen_q", call.max_seqlen_q, call.cu_seqlens_q, most_q),
        max_seqlen_k=checks.at_most("max_seqlen_k", call.max_seqlen_k, call.cu_seqlens_k, most_k),
        scale=float(q.shape[-1] ** -0.5 if call.scale is None else call.scale),
        softcap=float(call.softcap),
    )
