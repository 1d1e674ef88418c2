"""Bugs of grpo_loss's native backend that the checker must catch: each is one edit of the source."""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

ADVANTAGES = (
    Bug(
        "one-pass variance",
        "_group_sums(centred.square()[None], start, end)",
        "_group_sums(r.square()[None], start, end) - (total.square() / size)[None]",
    ),
    Bug("sample standard deviation", "squares / size", "squares / (size - 1)"),
    Bug("eps added", "torch.maximum((squares / size).sqrt(), eps)", "((squares / size).sqrt() + eps)"),
    Bug("equal rewards not compared", "torch.where(unlike == 0, 0.0, scaled)", "scaled"),
    Bug("rewards rounded to FP32", "r = rewards.double()", "r = rewards.float()"),
    Bug("boundary belongs to the group before it", "right=True", "right=False"),
    Bug("reads one reward beyond the group", "(other < end)", "(other <= end)"),
    Bug(
        "group sums from sums over the batch",
        "    count = x.shape[1]\n",
        "    sums = x.cumsum(1)\n    return sums[:, end - 1] - sums[:, start] + x[:, start]\n    count = x.shape[1]\n",
    ),
)
TERMS = (
    Bug("upper bound off by a hair", "1 + clip_eps) * a", "1 + 1.0001 * clip_eps) * a"),
    Bug(
        "tie at a bound takes the clipped branch",
        "~(clipped > unclipped)",
        "(clipped < unclipped) | ((ratio - 1).abs() < clip_eps)",
    ),
    Bug(
        "no gradient outside the range, whatever the sign of A",
        "~(clipped > unclipped)",
        "(ratio - 1).abs() <= clip_eps",
    ),
    Bug(
        "masks by multiplication, after the exponential",
        "(x.view(lanes.dtype) & lanes).view(x.dtype)",
        "x * (lanes != 0)",
    ),
    Bug("A = 0 not taken out before the exponential", "mask & (a != 0)", "mask & (a == a)"),
    Bug("KL not masked", "_keep(ref.to(dtype) - current, active)", "(ref.to(dtype) - current)"),
    Bug("naive k3", "_keep(e * e * series, small) + _keep(expm1 - e, ~small)", "e.exp() - e - 1"),
    Bug("series of k3 too short", "torch.float32: 5", "torch.float32: 2"),
    Bug("beta missing in the gradient", "slope + beta * k3_slope", "slope + k3_slope"),
)
SUMS = (
    Bug("count rounded to BF16", ".clamp(min=1).to(dtype)", ".clamp(min=1).bfloat16().to(dtype)"),
    Bug(
        "halves of the sequences summed apart",
        "rowwise.row_sum(sums)",
        "sum(rowwise.row_sum(part) for part in sums.tensor_split(2))",
    ),
    Bug(
        "segments follow the length",
        "pad_to(x, -1, SEGMENT).unflatten(-1, (-1, SEGMENT)) if x.shape[-1] > SEGMENT",
        "pad_to(x, -1, 2).unflatten(-1, (2, -1)) if x.shape[-1] > 1",
    ),
    Bug("last segment skipped", "trees.unbind(-1)", "trees.unbind(-1)[: max(x.shape[-1] // SEGMENT, 1)]"),
    Bug(
        "last block of sequences skipped",
        "range(0, current.shape[0], height)",
        "range(0, max(current.shape[0] - height + 1, 1), height)",
    ),
    Bug("sums of KL not zeroed", "(current.new_zeros(current.shape[0]", "(current.new_empty(current.shape[0]"),
    Bug(
        "slope kept between calls",
        "    slope = current_logps.new_empty(current_logps.shape, ",
        "    slope = vars(rowwise).setdefault('kept', {}).setdefault(current_logps.shape, torch.empty_like("
        "current_logps, memory_format=torch.contiguous_format).float())\n    current_logps.new_empty((), ",
    ),
    Bug("slope not divided by the count", "upstream.to(slope.dtype) / count", "upstream.to(slope.dtype)"),
    Bug(
        "backward overwrites what it needs again",
        "_keep(slope * (upstream.to(slope.dtype) / count), active)",
        "_keep(slope.mul_(upstream.to(slope.dtype) / count), active)",
    ),
    Bug("masked tokens not marked", "(lanes & torch.iinfo(lanes.dtype).min)", "(lanes & 0)"),
    Bug(
        "mask missing in the backward pass",
        "_keep(slope * (upstream.to(slope.dtype) / count), active)",
        "slope * (upstream.to(slope.dtype) / count)",
    ),
)

MUTANTS = (Mutants("native", ("rl_kernels.core.rowwise", "rl_kernels.grpo_loss.native"), (*ADVANTAGES, *TERMS, *SUMS)),)
