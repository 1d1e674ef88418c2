"""Log-probabilities and ranks of sampled tokens, in one launch."""

from __future__ import annotations

import functools

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import CACHE_SIZE, Launch
from rl_kernels.models.fused.conditions import fits

BLOCK = 8192


def score_tokens(
    logits: torch.Tensor, norm: torch.Tensor | None, token_ids: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the log-probability ``[N]`` of a token for each row, and its rank ``[N]``, int64.

    Args:
        logits: ``[N, V]``, FP32; may have padded rows.
        norm: ``[N, 2]``, FP32, contiguous, as ``LinearLogits`` has it: log-probabilities then have the bits of its
            ``logp``. None: they are None.
        token_ids: ``[N]``, int64 or int32. An id outside of ``[0, V)`` has the log-probability NaN and no rank.

    The rank is the number of logits of the row that are at least the token's, so it is 1 for the largest.
    """
    if fits(logits) and logits.stride(-1) == 1:
        rows = logits.shape[0]
        logps, ranks = None if norm is None else norm.new_empty(rows), logits.new_empty(rows, dtype=torch.int64)
        kind = logits.get_device(), token_ids.dtype, norm is None
        with device_of(logits):
            _launch_of(*kind, rows, logits.stride(0), logits.shape[1])(
                logits, norm, token_ids.contiguous(), logps, ranks
            )
        return logps, ranks
    within = token_ids.long().clamp(0, logits.shape[-1] - 1)
    chosen = logits.gather(1, within[:, None]).masked_fill_((within != token_ids)[:, None], torch.nan)
    ranks = (logits >= chosen).sum(-1)
    if norm is None:
        return None, ranks
    return (chosen - norm[:, :1]).sub_(norm[:, 1:]).clamp_(max=0)[:, 0], ranks


@functools.lru_cache(CACHE_SIZE)
def _launch_of(device: int, ids: torch.dtype, without_norm: bool, rows: int, stride: int, vocab: int) -> Launch:
    """Return the launch for tensors of one kind: a step of an engine has the same kind as the one before."""
    from rl_kernels.models.fused import kernels

    return Launch(kernels.score_tokens, (rows,), (stride, vocab, BLOCK), num_warps=8)
