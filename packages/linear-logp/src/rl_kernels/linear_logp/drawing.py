"""What a sampler keeps of a row of logits and which token it draws: the definition, in PyTorch.

With ``z = x / temperature`` in FP32 and ``d = max z - z``, an entry has the mass ``2^40 e^-d``, rounded down to an
integer. Sums of masses are sums of integers: they are exact, so no order, cut, batch or device changes a threshold or a
token. ``e^-d`` is a polynomial of separate FP32 products and sums, which every device rounds alike.

The filters, in this order:

- top-k keeps z at or above the k-th largest;
- top-p keeps z at or above the largest threshold at which the mass reaches p times that of the entries kept by top-k;
- min-p keeps ``d <= -log(min_p)``.

The token is the first one, in the order of the vocabulary, at which the mass of the kept entries exceeds
``uniform`` times their whole mass: the inverse of the distribution function. Fractions of a mass count in units of
2^-31. Temperature 0 draws the first of the largest logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from rl_kernels.linear_logp.inputs import slices

MASS_BITS = 40
"""The largest entry of a row has the mass 2^40; one below 2^-40 of it has none."""
FRACTION_BITS = 31
"""Bits of top_p and of a uniform number: a product with a mass takes 64."""
MOST_COLUMNS = 1 << 21
"""Columns whose masses are sure to fit into a sum of 64 bits, times a fraction."""
LOG2E = 1.4426950408889634
POWERS = (
    1.0,
    -0.6931437253952026,
    0.2401801496744156,
    -0.055297356098890305,
    0.009205796755850315,
    -0.0009449030621908605,
)
"""Coefficients of 2^-f, 0 <= f < 1, ascending; the relative error is at most 3e-7 in FP32."""
LONGEST_SHIFT = 62.0
"""A mass shifted by so many bits is 0."""
BLOCK_ELEMENTS = 1 << 22
"""Logits processed at once. Rows are independent, so this changes no bit."""


class Request(NamedTuple):
    """What is asked of a sampler; numbers of no dims, or one per row, in FP32. None turns a filter off.

    Attributes:
        temperature: >= 0.
        top_k: 0, or at least V, keeps all.
        top_p: 1 keeps all.
        limit: ``-log(min_p)``; inf keeps all.
        uniform: ``[N]``, FP32 or FP64, in ``[0, 1)``.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    limit: torch.Tensor | None
    uniform: torch.Tensor


class Drawn(NamedTuple):
    """Tokens, and what their log-probabilities need; all ``[N]``.

    Attributes:
        ids: int64; 0 for a row without a distribution.
        min_logit: FP32, the smallest z that is kept; -inf if no filter was on; NaN for a row without a distribution.
        temperature: FP32, that of the log-probabilities: 1 where 0 was asked for.
    """

    ids: torch.Tensor
    min_logit: torch.Tensor
    temperature: torch.Tensor


def draw(logits: torch.Tensor, norm: torch.Tensor, request: Request) -> Drawn:
    """Draw a token for each row of ``logits[N, V]``, whose softmax statistics are ``norm[N, 2]``."""
    parts = [_draw(logits[rows], norm[rows], _of_rows(request, rows, logits)) for rows in _blocks(logits)]
    return Drawn(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    count, vocab = logits.shape
    return slices(max(count, 1), max(BLOCK_ELEMENTS // vocab, 1))


def _of_rows(request: Request, rows: slice, logits: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters of some rows, ``[n]`` each, on the device of the logits."""
    count, off = logits[rows].shape[0], (1.0, 0.0, 1.0, torch.inf, 0.0)
    values = (
        torch.tensor(default, device="cpu") if value is None else value
        for value, default in zip(request, off, strict=True)
    )
    return [(x[rows] if x.ndim else x.expand(count)).to(logits.device) for x in values]


def _draw(logits: torch.Tensor, norm: torch.Tensor, request: list[torch.Tensor]) -> Drawn:
    temperature, top_k, top_p, limit, uniform = request
    vocab, is_greedy = logits.shape[1], temperature == 0
    temperature = torch.where(is_greedy, 1.0, temperature)
    z, top = logits / temperature[:, None], (norm[:, 0] / temperature)[:, None]
    is_undefined = norm.isnan().any(1) | ~top[:, 0].isfinite()
    # Numbers of rows without a distribution are arbitrary, but no NaN.
    z = torch.where(is_undefined[:, None], 0.0, z)
    top = torch.where(is_undefined[:, None], 0.0, top)

    ordered = z.sort(descending=True).values
    count = torch.where(is_greedy | ~(top_k < vocab), 0.0, top_k).clamp(min=0).long()[:, None]
    kth = torch.where(count > 0, ordered.gather(1, (count - 1).clamp(min=0)), -torch.inf)
    reached = torch.where(ordered >= kth, masses(top - ordered), 0).cumsum(1)
    target = share(reached[:, -1:], fraction(top_p)[:, None]).clamp(min=1)
    pth = ordered.gather(1, (reached < target).sum(1, keepdim=True).clamp(max=vocab - 1))
    pth = torch.where((is_greedy | (top_p >= 1))[:, None], -torch.inf, pth)
    farthest = torch.where(is_greedy, 0.0, limit)[:, None]

    is_kept = (z >= kth) & (z >= pth) & (top - z <= farthest)
    mass = torch.where(is_kept, masses(top - z), 0).cumsum(1)
    units = torch.where(is_greedy, 0, fraction(uniform)).clamp(max=(1 << FRACTION_BITS) - 1)
    wanted = share(mass[:, -1], units)
    ids = (mass <= wanted[:, None]).sum(1)
    least = torch.where(is_kept, z, torch.inf).amin(1)
    keeps_all = ((kth == -torch.inf) & (pth == -torch.inf) & (farthest == torch.inf))[:, 0]
    least = torch.where(is_greedy | keeps_all, -torch.inf, least)
    # Parameters out of range may keep nothing.
    return Drawn(
        ids.masked_fill(is_undefined | (ids >= vocab), 0), least.masked_fill(is_undefined, torch.nan), temperature
    )


def masses(d: torch.Tensor) -> torch.Tensor:
    """Return ``2^40 e^-d`` for d >= 0, rounded down."""
    t = (d * LOG2E).clamp(max=LONGEST_SHIFT)
    whole = t.floor()
    f = t - whole
    power = torch.full_like(f, POWERS[-1])
    for coefficient in POWERS[-2::-1]:
        power = power * f + coefficient
    return ((power * (1 << 24)).long() << (MASS_BITS - 24)) >> whole.long()


def fraction(x: torch.Tensor) -> torch.Tensor:
    """Return a number of 0 to 1 in units of 2^-31, rounded down."""
    units = x.double() * (1 << FRACTION_BITS)
    return torch.where(units >= 0, units, 0.0).clamp(max=1 << FRACTION_BITS).long()


def share(mass: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """Return ``mass units / 2^31``, rounded down, without a product of more than 63 bits."""
    low = mass & ((1 << FRACTION_BITS) - 1)
    return (mass >> FRACTION_BITS) * units + ((low * units) >> FRACTION_BITS)
