"""Bugs of the Triton kernels of attention and of their host code, planted in copies of the backend.

They also run in Triton's interpreter, a thousand times slower, so a small case must show each of them.
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

_PACKAGE = "rl_kernels.attention.backends.triton"
GPU = "rl_kernels.attention.gpu"
MODULES = (
    *(f"{_PACKAGE}.{name}" for name in ("loads", "tiles", "forward", "backward", "dq", "dkdv")),
    *(f"{_PACKAGE}.{name}" for name in ("boxes", "plan", "passes")),
    *(GPU, f"{_PACKAGE}.backend"),
)
OF_HOST = MODULES[-5:]

TILES = (
    Bug(
        "accumulator not rescaled",
        "acc = product(acc, tl.broadcast_to(keep[:, None], acc.shape))\n    return above",
        "return above",
    ),
    Bug("sum not rescaled", "total = fma(total, keep, row_sum", "total = fma(total, keep * 0 + 1, row_sum"),
    Bug(
        "state of a segment not rescaled",
        "factor = tl.broadcast_to(a[:, None]",
        "factor = tl.broadcast_to(a[:, None] * 0 + 1",
    ),
    Bug(
        "half of a row's sum left out",
        "x = tl.sum(tl.reshape(x, [ROWS, 2, COLUMNS // (4 << step)]), 1)",
        "x = tl.max(tl.reshape(x, [ROWS, 2, COLUMNS // (4 << step)]), 1)",
    ),
    Bug(
        "a query sees one key too many", "tl.maximum(t + shift + right + 1, 0)", "tl.maximum(t + shift + right + 2, 0)"
    ),
    Bug("mask one key too wide", "(ahead <= right)", "(ahead <= right + 1)"),
    Bug("window one key short", "(ahead >= -left)", "(ahead > -left)"),
    Bug("window begins one key late", "tl.maximum(t + shift - left, gone)", "tl.maximum(t + shift - left + 1, gone)"),
    Bug(
        "blocks counted from the padding",
        "first = tl.minimum(tl.maximum(start, 0), end).to(tl.int32)",
        "first = tl.minimum(start, 0).to(tl.int32)",
    ),
    Bug("keys that are gone are seen", "tl.maximum(t + shift - left, gone)", "tl.maximum(t + shift - left, 0)"),
    Bug(
        "keys beyond those in use are seen",
        "end = tl.minimum(tl.maximum(tl.load(USED + b).to(tl.int64), 0), count).to(tl.int32)",
        "end = count",
    ),
    Bug(
        "every page is the first",
        "mask=known, other=0).to(tl.int64)\n        known = known & (page >= 0)",
        "mask=known, other=0).to(tl.int64) * 0\n        known = known & (page >= 0)",
    ),
    Bug("sink takes part twice", "tl.exp2(sink - base))", "2 * tl.exp2(sink - base))"),
    Bug("values behind the last key are read", "within(v, whole, length, BLOCK))\n    else", "v)\n    else"),
    Bug("block at the end left out", "if (whole < end) & (first < end):", "if (whole < end) & (first < 0):"),
    Bug("box of another head", "BOX.load([b, row + n, head, 0])", "BOX.load([b, row + n, 0 * head, 0])"),
    Bug("box counted from row 0", "BOX.load([b, row + n, head, 0])", "BOX.load([b, 0 * row + n, head, 0])"),
    Bug("box at the page's begin", ".to(tl.int32), n % PAGE, head, 0])", ".to(tl.int32), 0 * n, head, 0])"),
)
FORWARD = (
    Bug(
        "segment behind the first starts at 0",
        "begin, stop = tl.maximum(first, segment), tl.minimum(end, segment + SEGMENT)\n        top",
        "begin, stop = first + 0 * segment, tl.minimum(end, segment + SEGMENT)\n        top",
    ),
    Bug(
        "last state not merged",
        "there = (at < stop) & (t < count)",
        "there = (at + SEGMENT < stop) & (t < count)",
    ),
    Bug(
        "heads of another group",
        "heads = head * GROUP + rows % GROUP\n    shift",
        "heads = head * GROUP + (rows + 1) % GROUP\n    shift",
    ),
)
BACKWARD = (
    Bug("delta left out", "product(weights, dweights - delta)", "product(weights, dweights)"),
    Bug(
        "dk without the last rows",
        "end = t_high * GROUP",
        "end = t_high * GROUP - ROWS",
    ),
    Bug(
        "scale left out of dk",
        "dk = product(dk, tl.full(dk.shape, scale, tl.float32))",
        "dk = product(dk, tl.full(dk.shape, 1.0, tl.float32))",
    ),
    Bug("rows of another group", "head * GROUP, 0])", "head, 0])"),
    Bug("rows behind the last query are read", "grad = within(grad, whole, used * GROUP, ROWS)", "grad = grad"),
    Bug("keys behind the last one are read", "k = within(k, whole, length, BLOCK)", "k = k"),
)
HOST = (
    Bug(
        "tiles rounded down",
        "return ceil_div(self.longest_q * self.group, rows)",
        "return max(self.longest_q * self.group // rows, 1)",
    ),
)
LAUNCHES = (
    Bug(
        "sinks read as if they were contiguous",
        "(None if x is None else x.contiguous() for x in given.others)",
        "(given.sinks, *(None if x is None else x.contiguous() for x in given.others[1:]))",
    ),
    Bug(
        "table read as if it were contiguous",
        "(None if x is None else x.contiguous() for x in given.others)",
        "(*(None if x is None else x.contiguous() for x in given.others[:-1]), given.block_table)",
    ),
    Bug(
        "columns of a merge by the head size",
        "(tile.rows // PART) * ceil_div(self.width_v, COLUMNS)",
        "(tile.rows // PART) * ceil_div(self.size_v, COLUMNS)",
    ),
    Bug("head size left out of what is aligned", "return last[0] == 1 and all(", "return all("),
    Bug("no segment for keys that are gone", "self.longest_k += SEGMENT - 1", "self.longest_k += 0"),
    Bug("keys always split", "split = segments > 1 and", "split = segments > 0 and"),
    Bug(
        "states of one segment too few",
        "programs * self.kv_heads * segments * tile.rows if split",
        "programs * self.kv_heads * (segments - 1) * tile.rows if split",
    ),
    Bug("strides in elements", "return batch // UNIT, strides[-3] // UNIT", "return batch, strides[-3] // UNIT"),
    Bug("scale twice with a cap", "LOG2E if self.capped else self.scale * LOG2E", "self.scale * LOG2E"),
    Bug("an open window is short", "FAR = 1 << 30", "FAR = 1 << 10"),
    Bug("gradient read as if it were contiguous", "deltas, _canonical(grad))", "deltas, grad)"),
    Bug(
        "room of the cache from its pages",
        "self.keys = table[1] * self.page * bool(self.pages)",
        "self.keys = self.pages * self.page",
    ),
    Bug(
        "kernel of keys with the tiles of queries",
        "parts = ceil_div(self.longest_k, cut.keys)",
        "parts = ceil_div(self.longest_q, cut.keys)",
    ),
    Bug("box across pages", "(table is None or self.page % BLOCK == 0)", "True"),
    Bug("box of rows at one place", "if not all(size == 1 or size * step", "if not all(True or size * step"),
    Bug("box of v as wide as k", "return self.width, self.width_v", "return self.width, self.width"),
    Bug("box of heads for rows", "block = rows // self.group, self.group", "block = self.group, rows // self.group"),
    Bug("small calls through TMA", "(self.fast and is_large)", "self.fast"),
    Bug("large calls by pointers", "(self.fast and is_large)", "(self.fast and not is_large)"),
    Bug("keys of one sequence make a call large", "is_large = batch * self", "is_large = self"),
    Bug("descriptor of k for v", "boxes[0].of(first), boxes[1].of(second)", "boxes[0].of(first), boxes[1].of(first)"),
)
"""Bugs of the host code that recorded launches show; most change no result in the interpreter."""
PLANNED = (
    Bug("launches with lse for calls without", "self._forward.get(with_lse)", "self._forward.get(True)"),
    Bug("lse that nobody asked for", "dtype=torch.float32) if with_lse else None", "dtype=torch.float32)"),
    Bug("planned queries between multiples of 16 bytes", "if (q.data_ptr() | given.k", "if (given.k"),
    Bug("planned keys between multiples of 16 bytes", "| given.k.data_ptr() |", "|"),
    Bug(
        "planned values between multiples of 16 bytes", "given.k.data_ptr() | given.v.data_ptr()", "given.k.data_ptr()"
    ),
    Bug("operands of a backward pass lie as they like", "or _lie(given) != self._operands", ""),
    Bug("shapes alone are planned", "[(x.shape, x.stride(), x.dtype)", "[(x.shape, x.dtype)"),
    Bug("strides alone are planned", "[(x.shape, x.stride(), x.dtype)", "[(x.stride(), x.dtype)"),
    Bug("dtypes are not planned", "[(x.shape, x.stride(), x.dtype)", "[(x.shape, x.stride())"),
    Bug("a gradient lies as it likes", "or not is_apart(grad.shape, grad.stride())", ""),
    Bug("a gradient is anywhere", "(*given.operands, out, grad)", "(*given.operands, out)"),
    Bug("what was saved is anywhere", "(*given.operands, out, grad)", "(out, grad)"),
    Bug("integers lie as they like", "(out, lse, *given.others) if", "(out, lse) if"),
    Bug("out lies as it likes", "(out, lse, *given.others) if", "(lse, *given.others) if"),
    Bug("lse lies as it likes", "(out, lse, *given.others) if", "(out, *given.others) if"),
    Bug("integers of any dtype", "_kinds(given) != self._kinds or ", ""),
    Bug(
        "a gradient of any dtype",
        "(out.dtype, lse.dtype, grad.dtype) != self._saved",
        "(out.dtype, lse.dtype) != self._saved[:2]",
    ),
    Bug(
        "lse of any dtype",
        "(out.dtype, lse.dtype, grad.dtype) != self._saved",
        "(out.dtype, grad.dtype) != self._saved[::2]",
    ),
    Bug(
        "wrappers are planned",
        "if not are_plain(*given.operands, *given.others, out, lse, grad):",
        "if not are_plain(*given.operands, *given.others, out, lse):",
    ),
    Bug("out read as if it were contiguous", "_canonical(out.contiguous())", "_canonical(out)"),
    Bug("dtypes of a backward pass are one plan", "key = (strides, *dtypes)", "key = (strides,)"),
    Bug("keys of padding keep what was there", "written=not self._has_padding", "written=True"),
    Bug("gradient of keys that nobody asked for", "if needs_keys:", "if True:"),
    Bug(
        "sums of heads for those of keys", "self._plan.kv_heads, self._lse[-1], self._plan.group", "1, *self._lse[-2:]"
    ),
    Bug("packed queries are planned", "and given.cu_seqlens_q is None and", "and"),
    Bug("strided operands are planned", "if whole and lie and", "if whole and"),
    Bug("strided integers are planned", "if whole and lie and", "if lie and"),
    Bug("nothing is planned", " and not self._passes.plan_for(given).is_empty", ""),
    Bug("dtypes of integers are one plan", "tuple([None if x is None else x.dtype for", "tuple([None for"),
    Bug(
        "any gradient has the first one's launches",
        "self._backward.get(key)",
        "next(iter(self._backward.values()), None)",
    ),
)
"""Bugs of planned calls: a launch that differs from the general path's, or one that must not happen."""
CASES = (
    *("sinks", "window", "left-padded", "dropped", "dropped-unseen", "block-edge", "pages", "large-pages", "packed"),
    *("softcap", "segments", "window-from-block-end", "right-padded"),
)

MISSING = Bug("missing page is the first", 'score = tl.where(missing, float("nan"), score)', "score = score")
"""No relation uses a missing page; a separate test shows this bug."""

MUTANTS = (Mutants("triton", MODULES, (*TILES, *FORWARD, *BACKWARD, *HOST), CASES),)
