"""Bugs of grpo_loss's native backend that the checker must catch; each is one edit of the source."""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants
from rl_kernels.grpo_loss.spec import mutants_triton

ADVANTAGES = (
    Bug(
        "one-pass variance",
        "_group_sums(centred.square()[None], start, end)",
        "_group_sums(r.square()[None], start, end) - ((_group_sums(r[None], start, end)[0]).square() / size)[None]",
    ),
    Bug("sample standard deviation", 'size if formula.kind == "population" else', ""),
    Bug("eps added", "torch.maximum(std, eps)", "(std + eps)"),
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
    Bug("upper bound 0.01 % too wide", "1 + n.clip_high) * a)", "1 + 1.0001 * n.clip_high) * a)"),
    Bug(
        "tie at a bound takes the clipped branch",
        "~(clipped > unclipped)",
        "(clipped < unclipped) | ((ratio - 1).abs() < n.clip_high)",
    ),
    Bug(
        "no gradient outside the range, whatever the sign of A",
        "~(clipped > unclipped)",
        "(ratio - 1).abs() <= n.clip_high",
    ),
    Bug(
        "masks by multiplication, after the exponential",
        "(x.view(lanes.dtype) & lanes).view(x.dtype)",
        "x * (lanes != 0)",
    ),
    Bug("A = 0 not masked before the exponential", "block.mask & (a != 0)", "block.mask & (a == a)"),
    Bug("KL not masked", "keep(block.ref.to(dtype) - current, where.active)", "(block.ref.to(dtype) - current)"),
    Bug("naive k3", "keep(e * e * series, small) + keep(expm1 - e, ~small)", "e.exp() - e - 1"),
    Bug("series of k3 too short", "torch.float32: 5", "torch.float32: 2"),
    Bug("beta missing in the gradient", "slope + n.beta * kl_slope", "slope + kl_slope"),
)
SUMS = (
    Bug("count rounded to BF16", "counts.long().sum().clamp", "counts.long().sum().bfloat16().clamp"),
    Bug(
        "halves of the batch summed separately",
        "rowwise.row_sum(each) / divisor",
        "sum(rowwise.row_sum(part) for part in each.tensor_split(2)) / divisor",
    ),
    Bug(
        "segments follow the length",
        "pad_to(x, -1, FAN).contiguous()",
        "F.pad(x, [-x.shape[-1] % FAN, 0]).contiguous()",
    ),
    Bug(
        "last terms skipped",
        "return _library_sum(x)",
        "return _library_sum(x[..., : max(x.shape[-1] // FAN, 1) * FAN])",
    ),
    Bug(
        "last block of sequences skipped",
        "range(0, current.shape[0], height)",
        "range(0, max(current.shape[0] - height + 1, 1), height)",
    ),
    Bug("sums of KL not zeroed", "found = current.new_zeros(", "found = current.new_empty("),
    Bug(
        "slope kept between calls",
        "    slope = call.current_logps.new_empty((call.batch, call.length), ",
        "    slope = vars(rowwise).setdefault('kept', {}).setdefault((call.batch, call.length), torch.empty("
        "call.batch, call.length))\n    call.current_logps.new_empty((), ",
    ),
    Bug("slope not divided by the count", "upstream.to(slope.dtype) / divisor", "upstream.to(slope.dtype)"),
    Bug(
        "backward overwrites what it needs again",
        "slope.clone(memory_format=torch.contiguous_format)",
        "slope",
    ),
    Bug("masked tokens not marked", "(masked & torch.iinfo(masked.dtype).min)", "(masked & 0)"),
    Bug(
        "mask missing in the backward pass",
        "(upstream.to(slope.dtype) / divisor).view(active.dtype).bitwise_and_(active)",
        "(upstream.to(slope.dtype) / divisor)",
    ),
)

FORMULAS = (
    Bug("delta bounds nothing", "ratio.clamp(max=n.delta)", "ratio"),
    Bug("no gradient between delta and the upper bound", "| (~flows & inside)", ""),
    Bug("dual clip for either sign", "(a < 0) & (term > ceiling)", "term > ceiling"),
    Bug("gradient beyond the dual clip", "flows & ~is_above", "flows"),
    Bug("lower bound is the upper one", "ratio.clamp(1 - n.clip_low,", "ratio.clamp(1 - n.clip_high,"),
    Bug("floor of cispo missing", "ratio.clamp(n.cispo_floor,", "ratio.clamp(0.0,"),
    Bug("cap of cispo is an offset", "n.cispo_cap)", "1 + n.cispo_cap)"),
    Bug("gate without its factor 4", "-(4 / tau * gate * a)", "-(1 / tau * gate * a)"),
    Bug("slope of the gate without the ratio", "q * ratio / (", "q / ("),
    Bug(
        "one temperature for either sign",
        "torch.full_like(a, n.sapo_temperature_neg)",
        "torch.full_like(a, n.sapo_temperature_pos)",
    ),
    Bug(
        "weight of vespo at its mean",
        "where.active))[:, None]\n    if rollout",
        "where.active))[:, None] / where.tokens\n    if rollout",
    ),
    Bug("vespo without the rollout ratio", "    if rollout is not None:", "    if False:"),
    Bug("decay of vespo missing at a ratio of 1", "(lam + k *", "(k *"),
    Bug(
        "gradient of a sequence's ratio not shared",
        "slope = keep(rowwise.row_sum(slope)[:, None]",
        "slope = keep(slope * where.tokens",
    ),
    Bug(
        "mean log-ratio over the padding too",
        "where.active))[:, None] / tokens).exp()",
        "where.active))[:, None] / block.mask.shape[1]).exp()",
    ),
    Bug("mask truncates", "torch.where((weight < n.rollout_min)", "torch.where((weight < -1)"),
    Bug("rollout ratio not in the gradient", "term * weight, slope * weight", "term * weight, slope"),
    Bug("k1 with the other sign", "0.0 - e, torch.ones_like(e)", "e, -torch.ones_like(e)"),
    Bug("k2 without its half", "e * e * 0.5, -e", "e * e, -e"),
    Bug("corrected k3 without the gradient of its ratio", "own = -e if", "own = slope if"),
    Bug("corrected KL of a sequence without the gradient of its ratio", "(slope + shared) * ratio", "slope * ratio"),
    Bug("slope of a sequence's mean not divided", "slope = slope / tokens", "slope = slope * 1"),
    Bug("length of dr_grpo missing", "(n.length or max(length, 1))", "1"),
    Bug("normaliser ignored", "if normaliser is not None:", "if False:"),
    Bug("number of sequences rounded up", "max(counts.shape[0], 1)", "counts.shape[0] + 1"),
)
ESTIMATORS = (
    Bug("leave_one_out with the inverse factor", "centred * size / (size - 1)", "centred * (size - 1) / size"),
    Bug("population deviation of the batch", "/ (size - 1)).sqrt()", "/ size).sqrt()"),
    Bug("missing reward counted", "present.double()[None]", "torch.ones_like(r)[None]"),
    Bug("missing reward has an advantage", "centred = torch.where(present, centred, 0.0)", "pass"),
)
MEASURES = (
    Bug("clipped shares exchanged", '"clip_low"], values["clip_high"]', '"clip_high"], values["clip_low"]'),
    Bug(
        "metrics over the padding",
        "active = lanes(block.mask, dtype)",
        "active = lanes(block.mask == block.mask, dtype)",
    ),
    Bug("effective samples not squared", 'sums["ratio"].square()', 'sums["ratio"]'),
)
OVER_RANKS = (
    Bug("ranks in reverse", "zip(parts, self.counts, strict=True)", "[*zip(parts, self.counts, strict=True)][::-1]"),
    Bug("padding of other ranks counted as sequences", "part[..., :count]", "part"),
    Bug(
        "counts of the ranks exchanged",
        'tuple(one["batch"] for one in found)',
        'tuple(one["batch"] for one in found[::-1])',
    ),
    Bug("advantages of the first rank's rewards", "x[sum(self.counts[:rank]) :]", "x[: len(x)]"),
    Bug("own length divides", "call.normaliser, batch.length, call", "call.normaliser, call.length, call"),
    Bug("sums of this rank only", "batch.gathered(sums)", "sums"),
    Bug("rewards of this rank only", "batch.gathered(rewards)", "rewards"),
    Bug(
        "number of ranks in the divisor",
        "call.normaliser, batch.length",
        "call.normaliser, batch.length * len(batch.counts)",
    ),
    Bug(
        "slope divided by the number of ranks",
        'sums, slope = ops["sums_grad"](current_logps, *others)',
        'sums, slope = ops["sums_grad"](current_logps, *others)\n            slope = slope / len(batch.counts)',
    ),
)
"""Bugs of batches that are spread over ranks; ``tests/test_ranks.py`` plants them."""
NATIVE = tuple(f"rl_kernels.grpo_loss.backends.native.{name}" for name in ("advantages", "terms", "metrics", "backend"))

MUTANTS = (
    Mutants(
        "native",
        ("rl_kernels.core.rowwise", "rl_kernels.grpo_loss.lanes", *NATIVE),
        (*ADVANTAGES, *TERMS, *SUMS, *FORMULAS, *ESTIMATORS, *MEASURES),
    ),
    *mutants_triton.MUTANTS,
)
