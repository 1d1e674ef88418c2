"""The API of thinking-machines' batch_invariant_ops on our operators: a script only changes its import.

``import rl_kernels.models.clients.batch_invariant_ops as batch_invariant_ops``. In the mode ``torch.mm``, ``addmm``,
``bmm``, ``log_softmax`` and ``mean`` compute a row with the same bits alone and in any batch. So do ``nn.Linear``, and
``torch.matmul`` except with vectors, because they call the first three. Names and meaning follow
https://github.com/thinking-machines-lab/batch_invariant_ops and most additions of its copies in SGLang and vLLM; the
code is ours.
"""

from rl_kernels.models.clients.batch_invariant_ops.functions import (
    AttentionBlockSize,
    addmm_batch_invariant,
    bmm_batch_invariant,
    get_batch_invariant_attention_block_size,
    linear_batch_invariant,
    log_softmax,
    matmul_persistent,
    mean_batch_invariant,
    mean_dim,
    mm_batch_invariant,
    rms_norm,
    rms_norm_batch_invariant,
)
from rl_kernels.models.clients.batch_invariant_ops.mode import (
    disable_batch_invariant_mode,
    enable_batch_invariant_mode,
    is_batch_invariant_mode_enabled,
    set_batch_invariant_mode,
)

__all__ = [
    "AttentionBlockSize",
    "addmm_batch_invariant",
    "bmm_batch_invariant",
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "get_batch_invariant_attention_block_size",
    "is_batch_invariant_mode_enabled",
    "linear_batch_invariant",
    "log_softmax",
    "matmul_persistent",
    "mean_batch_invariant",
    "mean_dim",
    "mm_batch_invariant",
    "rms_norm",
    "rms_norm_batch_invariant",
    "set_batch_invariant_mode",
]
