"""Logits to sample from, and the log-probabilities of what is sampled, from one reading of the weight.

An inference engine needs both, and reading the weight is most of a small batch's work. The forward pass of
``linear_logp`` keeps all its logits and the two numbers of each row's softmax; the log-probability follows from them
once a token is known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.torchlib.autocast import autocast_linear
from rl_kernels.core.torchlib.derivatives import no_lost_derivatives
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.scalars import scalar
from rl_kernels.linear_logp.arguments import Options, cap_numbers, checked
from rl_kernels.linear_logp.inputs import rows_of
from rl_kernels.linear_logp.op import OPERATOR, describe, ops
from rl_kernels.linear_logp.sampled import Sampled, request_of
from rl_kernels.linear_logp.vocabulary import BLOCK

MIB = 1 << 20
REMEMBERED = 1024
"""Largest number of rows whose ids are remembered: of more rows, making them takes no time beside the product."""


_Rest = tuple[torch.Tensor, torch.Tensor, int]


class LinearLogits(NamedTuple):
    """What ``linear_logits`` returns.

    Attributes:
        logits: ``[..., V]``, FP32 (FP64 for FP64 inputs), may have padded rows. ``logp`` reads them: change a copy.
        norm: ``[..., 2]``, in the same dtype: the largest logit of a row, and the log of the sum of ``e^(z - max z)``.
        version: address and version of the logits as returned; None if PyTorch does not count versions.
        backend: the backend that computed them.
        dtype: dtype of the operands.
    """

    logits: torch.Tensor
    norm: torch.Tensor
    version: tuple[int, int] | None
    backend: str
    dtype: torch.dtype

    def sample(
        self,
        *,
        temperature: float | torch.Tensor = 1.0,
        top_k: int | torch.Tensor = 0,
        top_p: float | torch.Tensor = 1.0,
        min_p: float | torch.Tensor = 0.0,
        uniform: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
        validate: bool = True,
    ) -> Sampled:
        """Draw a token for each row from what top-k, top-p and min-p keep of its softmax.

        With ``z = logits / temperature`` each filter keeps what lies at or above a threshold of z, equal logits alike.
        They apply in this order: top-k; top-p, of the mass of what top-k keeps; min-p, relative to the largest
        probability. The token is found by the inverse of the distribution function, in the order of the vocabulary. A
        row's results depend on its logits, its parameters and its uniform number alone, bit for bit; token and
        min_logit are the same on every backend and device for the same logits.

        At temperature 0 the token is the first of the largest logits. Filters are then off, and both log-probabilities
        are those at temperature 1, as in vLLM.

        Args:
            temperature: a number >= 0, or a floating-point tensor of no dims or ``[...]``, as for the next three.
            top_k: an integer >= 0, or an int64 or int32 tensor: entries to keep, and those equal to the last of them.
                0, or V and more, keeps all.
            top_p: in (0, 1]: keep the fewest entries, largest first, with this share of the probability. 1 keeps all.
            min_p: in [0, 1): keep entries with at least this times the largest probability. 0 keeps all.
            uniform: ``[...]``, FP32 or FP64, in [0, 1): a number for each row, of which 31 bits count. None: they are
                drawn by the generator.
            generator: of the device of the logits; None: PyTorch's own.
            validate: check the values of tensors, which syncs with a GPU. Skipped under torch.compile and graph
                capture. Without the check a row without a distribution (NaN, +inf, only -inf) gives the id 0, NaN for
                its log-probabilities and min_logit; other values out of range give tokens of some other distribution.

        Raises:
            TypeError, ValueError: an argument is not as described, or the logits are FP64; the message names it.
            RuntimeError: the logits were changed, as for ``logp``.
        """
        self._check_unchanged()
        arguments = temperature, top_k, top_p, min_p, uniform, generator, validate
        request = request_of(self.logits, self.norm, *arguments)
        leading, logits = self.logits.shape[:-1], rows_of(self.logits)
        # A copy of the logits may be in another order.
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        results = ops["sample"](logits, self.norm.view(-1, 2), *request, self.dtype, self.backend)
        return Sampled(*(x if len(leading) == 1 else x.view(leading) for x in results))

    def logp(self, target_ids: torch.Tensor, *, validate: bool = True) -> torch.Tensor:
        """Return the log-probability of a token for each row, with the bits of ``linear_logp``.

        Args:
            target_ids: ``[...]``, int64 or int32, each in ``[0, V)``.
            validate: check the values of ids, which syncs with a GPU. Without it an id out of range gives NaN.

        Returns:
            ``[...]``, in the dtype of the logits.

        Raises:
            TypeError, ValueError: target_ids is not as described.
            RuntimeError: they were changed since; not detected under ``torch.inference_mode`` or ``torch.compile``.
        """
        vocab = self.logits.shape[-1]
        check.target_ids("target_ids", target_ids, self.logits.shape[:-1], "the leading dims of the logits")
        check.same_device(logits=self.logits, target_ids=target_ids)
        if validate:
            check.ids_in_range("target_ids", target_ids, vocab, None)
        self._check_unchanged()
        ids = target_ids.long()
        within = ids if validate else ids.clamp(0, vocab - 1)
        chosen = self.logits.gather(-1, within[..., None])
        if not validate:
            chosen = torch.where((within == ids)[..., None], chosen, torch.nan)
        return self.logp_of(chosen)[..., 0]

    def logp_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of some of the logits of each row, with the bits of ``logp``.

        Args:
            logits: ``[..., k]``, of these rows as ``linear_logits`` returned them.

        Returns:
            ``[..., k]``, in the dtype of the logits.

        Raises:
            ValueError: the leading dims or the dtype are not those of the logits.
        """
        if logits.shape[:-1] != self.logits.shape[:-1] or logits.dtype != self.logits.dtype:
            expected = f"{self.logits.dtype} of shape {[*self.logits.shape[:-1], 'k']}"
            raise ValueError(f"logits: expected {expected}, got {logits.dtype} of shape {list(logits.shape)}")
        # What the backends compute at temperature 1, rounded as often, and never above 0.
        return (logits - self.norm[..., :1]).sub_(self.norm[..., 1:]).clamp_(max=0)

    def _check_unchanged(self) -> None:
        now = _version(self.logits)
        # A copy elsewhere is counted anew.
        if now and self.version and now[0] == self.version[0] and now != self.version:
            raise RuntimeError("logits: changed in place since linear_logits; change a copy of them")


def linear_logits(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
    backend: str | None = None,
) -> LinearLogits:
    """Return ``x = hidden @ W^T + bias`` unrounded, and what ``linear_logp`` would make of any token.

    With a softcap the logits are ``softcap tanh(x / softcap)``. For rollouts:
    ``linear_logits(hidden, weight).logp(ids)`` has the bits of ``linear_logp(hidden, weight, ids)``, and the weight is
    read once. A row of the logits depends on that row of ``hidden`` and the parameters alone, bit for bit. No
    gradients: call it under ``torch.no_grad()`` or ``torch.inference_mode()``.

    Args:
        hidden: ``[..., D]``, FP32, BF16, FP16 or FP64, any strides.
        lm_head_weight: ``[V, D]``, dtype and device of ``hidden``, any strides.
        bias: ``[V]``, dtype and device of ``hidden``, or None.
        softcap: as for ``linear_logp``.
        backend: name of a backend, ``auto``, or None, as for ``linear_logp``.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        BackendUnavailable: the requested backend cannot run this call.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
    """
    tensors = autocast_linear(hidden, lm_head_weight, bias)
    ready, cap, rest = _prepare(*tensors, softcap, backend)
    # Not in `_prepare`, which is remembered: derivatives are not part of a kind of arguments.
    no_lost_derivatives("linear_logits", *tensors)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError("linear_logits: expected no gradients, call it under torch.no_grad()")
    rows, leading, vocab = rows_of(tensors[0]), tensors[0].shape[:-1], lm_head_weight.shape[0]
    # A CUDA graph keeps what was made while it was captured, and not what is remembered here.
    ids, scale, mib = _rest(rows, vocab) if rest is None or values_hidden(rows) else rest
    _, norm, logits = ops["forward"].call(ready, rows, tensors[1], ids, tensors[2], scale, None, cap, None, mib)
    # Views take host time, and a decode step mostly needs none.
    if logits.shape != (*leading, vocab):
        logits, norm = logits[:, :vocab].view(*leading, vocab), norm.view(*leading, 2)
    return LinearLogits(logits, norm, _version(logits), ready.backend, tensors[0].dtype)


@remembered
def _prepare(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float,
    backend: str | None,
) -> tuple[Ready, torch.Tensor | None, _Rest | None]:
    """Check the arguments as ``linear_logp`` does, and choose its backend."""
    check.tensor("hidden", hidden, check.FLOATS, least=1)
    ids = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    options = Options(softcap=softcap)
    checked(hidden, lm_head_weight, ids, bias, None, options)
    dtype = compute_dtype(hidden.dtype)
    check.number("softcap", softcap, least=0, dtype=dtype)
    cap = cap_numbers(options, dtype)
    check.backend_name(backend)
    chosen = choose(OPERATOR, describe(hidden, lm_head_weight), backend).name
    rows = rows_of(hidden)
    ids, scale, mib = rest = _rest(rows, lm_head_weight.shape[0])
    ready = ops["forward"].ready(rows, lm_head_weight, ids, bias, scale, None, cap, None, mib, chosen)
    # A tensor that is made while a CUDA graph is captured has values only when the graph runs.
    return ready, cap, None if len(rows) > REMEMBERED or values_hidden(hidden) else rest


def _rest(rows: torch.Tensor, vocab: int) -> _Rest:
    """Return ids of no token in particular, the temperature, and the MiB of all logits, for ``forward``."""
    count, dtype = rows.shape[0], compute_dtype(rows.dtype)
    mib = -(-count * -(-vocab // BLOCK) * BLOCK * dtype.itemsize // MIB)
    return torch.zeros(count, dtype=torch.int64, device=rows.device), scalar(1.0, dtype), mib


def _version(x: torch.Tensor) -> tuple[int, int] | None:
    # A compiler traces none of these.
    if torch.compiler.is_compiling() or x.is_inference():
        return None
    return x.data_ptr(), x._version
