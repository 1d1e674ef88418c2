"""Bugs of grpo_loss's Triton kernels and host code, planted in copies of the backend; the checker must catch each.

They also run in Triton's interpreter, which is a thousand times slower, so a small case must show each one.
``LAUNCHES`` need large cases, or break a rule without changing a number; they are found in recorded launches.
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

MODULES = tuple(
    f"rl_kernels.grpo_loss.backends.triton.{name}"
    for name in (
        "groups",
        "terms",
        "tokens",
        "metrics",
        "sequence",
        "kernels",
        "reduce",
        "objectives",
        "plain",
        "planned",
        "backend",
    )
)

GROUPS = (
    Bug("one reward beyond the group", "is_there = place < end\n", "is_there = place <= end\n"),
    Bug("group of the sequence before", "start = row // groups * groups\n", "start = (row + 1) // groups * groups\n"),
    Bug(
        "boundary belongs to the group before it",
        "tl.load(boundaries + middle) <= row",
        "tl.load(boundaries + middle) < row",
    ),
    Bug(
        "last group not searched",
        "high = tl.full((), groups, tl.int64) - 1",
        "high = tl.full((), groups, tl.int64) - 2",
    ),
    Bug("sample standard deviation", "size if KIND == POPULATION else size - 1.0", "size - 1.0"),
    Bug("eps added", "tl.where(std < eps, least, std), equal", "std + least, equal"),
)
LOSS = (
    Bug(
        "lower bound is the upper one",
        "tl.minimum(tl.maximum(ratio, low), high)",
        "tl.minimum(tl.maximum(ratio, high), high)",
    ),
    Bug("gradient of clipped tokens", "tl.where(is_clipped, 0.0, unclipped)", "unclipped"),
    Bug(
        "mask of the token not read",
        "would be NaN.\n    counted = is_active & (a != 0.0)",
        "would be NaN.\n    counted = a != 0.0",
    ),
    Bug(
        "KL of masked tokens",
        "k3_of(tl.where(is_active, other.to(tl.float32) - x, 0.0))",
        "k3_of(other.to(tl.float32) - x)",
    ),
    Bug("beta missing in the gradient", "slope = fma(constant(beta), -expm1, slope)", "slope = slope - expm1"),
    Bug(
        "advantages of the tokens of the first sequence",
        "a = tl.load(scores + row * score_row + columns, mask=here",
        "a = tl.load(scores + columns, mask=here",
    ),
    Bug(
        "slope stored with the stride of the inputs",
        "tl.store(slope + row * length + columns, marked",
        "tl.store(slope + row * (length - 1) + columns, marked",
    ),
    Bug("sum of the KL not stored", "tl.store(place + batch, tree(kl_sum))", "pass"),
    Bug(
        "last sequence not counted",
        "total += tl.load(place + 2 * apart, mask=here, other=0.0).to(tl.int64)\n            policy",
        "total += tl.load(place + 2 * apart, mask=rows < batch - 1, other=0.0).to(tl.int64)\n            policy",
    ),
    Bug(
        "upstream gradient left out",
        "tl.div_rn(tl.load(upstream).to(tl.float32), tl.load(count))",
        "tl.div_rn(1.0, tl.load(count))",
    ),
    Bug(
        "last tokens have no gradient",
        "Work((-(-size // GRADIENT_BLOCK),), (size, GRADIENT_BLOCK)",
        "Work((max(size // GRADIENT_BLOCK, 1),), (size - 1, GRADIENT_BLOCK)",
    ),
)
HOST = (
    Bug(
        "bounds exchanged",
        "*(1 - n.clip_low, 1 + n.clip_high, n.beta, n.eps)",
        "*(1 - n.clip_high, 1 - n.clip_low, n.beta, n.eps)",
    ),
    Bug(
        "beta missing in the loss",
        "segments_of(length), call.values.beta, call",
        "segments_of(length), 1.0, call",
    ),
    Bug("per-token advantages taken for one per sequence", "scores.values.ndim == 2),\n", "False),\n"),
)
LAUNCHES = (
    Bug("one step for groups of up to 512", "samples <= LANES, formula", "samples <= 2 * LANES, formula"),
    Bug(
        "half the lanes",
        "min(max(1 << (size - 1).bit_length(), least), most)",
        "min(max(1 << (size - 1).bit_length() >> 1, least), most)",
    ),
    Bug("boundaries counted as groups", "boundaries.shape[0] - 1, LANES", "boundaries.shape[0], LANES"),
    Bug(
        "groups of boundaries in one step",
        "boundaries.shape[0] - 1, LANES, formula=",
        "boundaries.shape[0] - 1, LANES, True, formula=",
    ),
    Bug("stride of rewards taken for 1", "scores.groups, rewards.stride(0))", "scores.groups, 1)"),
    Bug(
        "one program per sequence for the advantages", "launch(_advantages, (programs,)", "launch(_advantages, (count,)"
    ),
    Bug(
        "last segment has no program",
        "return -(-length // SEGMENT)",
        "return max(length // SEGMENT, 1)",
    ),
    Bug("segments and sequences exchanged", "Work((batch, segments_of(length)),", "Work((segments_of(length), batch),"),
    Bug(
        "strided rows read as contiguous",
        "x.ndim == 1 or x.stride(1) == 1 else x.contiguous()",
        "True else x.contiguous()",
    ),
    Bug(
        "strides taken before the copy",
        "work = terms_work(call, scores, tensors)",
        "work = terms_work(call, scores, (current, call.old_logps, call.ref_logps, call.mask, scores[0]))",
    ),
    Bug("strided rows of objectives read as contiguous", "x is None or x.stride(1) == 1 else", "True else"),
    Bug("sums of another layout", "(segments_of(length), 3, batch), dtype", "(batch, 3, segments_of(length)), dtype"),
    Bug(
        "sums in the dtype of the inputs, of two quantities",
        "(segments_of(length), 3, batch), dtype",
        "(segments_of(length), 2, batch), dtype",
    ),
    Bug(
        "reference not summed",
        "call.values.beta, call.ref_logps is not None, LANES)",
        "call.values.beta, False, LANES)",
    ),
    Bug(
        "last sum over one warp of lanes only",
        "call.ref_logps is not None, LANES)",
        "call.ref_logps is not None, WARP)",
    ),
    Bug("strided slope read as if contiguous", "_scale(slope.contiguous(), count", "_scale(slope, count"),
    Bug("last tokens are not scaled", "(-(-size // GRADIENT_BLOCK),)", "(max(size // GRADIENT_BLOCK, 1),)"),
    Bug(
        "first sequence of expanded advantages used for all",
        "Scores(advantages[:, 0] if is_one else advantages)",
        "Scores(advantages[0] if is_one else advantages)",
    ),
    Bug("no room for the metrics", "SUMS + (len(METRICS) if call.with_metrics else 0)", "SUMS"),
    Bug("no programs for the metrics", "(1 + len(metrics),)", "(1,)"),
    Bug("one program per sequence, not per segment", "(call.batch * segments,)", "(call.batch,)"),
    Bug(
        "long sequences taken as one step", "is_whole = by_sequence and lanes >= call.length", "is_whole = by_sequence"
    ),
    Bug("wide lanes for every objective", "WIDE if by_sequence else LANES", "WIDE"),
    Bug("last sum not told about means of sequences", 'plan.mean == "sequences", quantities', "False, quantities"),
)
PLANNED = (
    Bug(
        "slope launch used without a slope",
        "self._terms_and_slope if needs_slope else self._terms",
        "self._terms_and_slope",
    ),
    Bug("reference read with beta of 0", "ref_logps if self._has_ref else None", "ref_logps"),
    Bug("planned sums of another layout", "segments_of(length), 3, batch\n", "batch, 3, segments_of(length)\n"),
    Bug("plan accepts any layout of rows", "lie = all(rows_of(x) is x for x in tensors)", "lie = True"),
    Bug("plan accepts expanded advantages", "if lie and scores.values is given else None", "if lie else None"),
    Bug("plan treats boundaries as sizes", " or call.boundaries is not None:", ":"),
    Bug("plan accepts empty calls", " or not call.current_logps.numel()", ""),
    Bug("plan accepts other objectives", "if not is_plain(call) or not", "if not"),
    Bug("planned backward accepts tensor subclasses", "if not are_plain(*given) or", "if"),
    Bug("planned backward accepts another dtype", " or current_logps.dtype != self._dtype:", ":"),
    Bug("planned backward accepts another slope shape", "if slope.shape != self._shape or not", "if not"),
    Bug("planned backward accepts a strided slope", "or not slope.is_contiguous() ", ""),
    Bug("planned backward accepts any upstream dtype", "x.dtype == torch.float32 and x.device", "x.device"),
    Bug("planned backward accepts a large upstream gradient", " or upstream.numel() != 1:", ":"),
    Bug("planned backward accepts a large count", "or count.numel() != 1 or", "or"),
    Bug("planned backward overwrites what is needed again", "slope if overwrite and", "slope if"),
    Bug("planned backward puts a 16-bit gradient into the slope", " and self._dtype == torch.float32 else", " else"),
)
"""Bugs of planned calls, found in recorded launches."""
OF_SEQUENCES = (
    Bug("first segment only", "    for segment in sums:\n", "    for segment in sums[:1]:\n"),
    Bug(
        "smallest ratio summed", "total[least], total[most] = sums[:, least].amin(0), sums", "_, total[most] = 0, sums"
    ),
    Bug("KL of sequences not zeroed", "found = torch.zeros((", "found = torch.full(fill_value=1.0, size=("),
)
"""Bugs of the sums that ranks exchange; ``tests/test_ranks.py`` plants them."""
CASES = ("kl", "ragged", "advantages-per-token", "groups-ragged")

MUTANTS = (Mutants("triton", MODULES, (*GROUPS, *LOSS, *HOST), CASES),)
