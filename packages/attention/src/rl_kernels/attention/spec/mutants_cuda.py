"""Bugs of the host code of ``cuda-sm90``, planted in copies of the backend; recorded launches show them."""

from __future__ import annotations

from rl_kernels.core.testing import Bug

_PACKAGE = "rl_kernels.attention.backends.cuda_sm90"
MODULES = (
    *(f"{_PACKAGE}.{name}" for name in ("schedule", "plan", "passes")),
    *("rl_kernels.attention.gpu", f"{_PACKAGE}.backend"),
)
"""Every module of the host code; the last one is the backend's."""
BUGS = (
    Bug("one consumer for many rows", "1 if rows <= HEIGHT else MOST", "1 if rows <= 2 * HEIGHT else MOST"),
    Bug(
        "tiles rounded down",
        "tiles, segments = -(-rows // tile.rows)",
        "tiles, segments = max(rows // tile.rows, 1)",
    ),
    Bug("keys always split", "split = segments > 1 and", "split = segments > 0 and"),
    Bug("keys never split", "split = segments > 1 and", "split = segments > 9 and"),
    Bug("no segment for keys that are gone", "self._longest_k += SEGMENT - 1", "self._longest_k += 0"),
    Bug(
        "states of one segment too few",
        "count * segments * held * (2",
        "count * (segments - 1) * held * (2",
    ),
    Bug("an odd number of rows with states", "rows + rows % 2)", "rows)"),
    Bug("states of whole tiles", "held = min(tile.rows, rows + rows % 2)", "held = tile.rows"),
    Bug("two consumers of narrow heads", "MOST_GROUPS = {(64, 64): 3}", "MOST_GROUPS = {(64, 64): 2}"),
    Bug("three consumers of wide heads", "MOST_GROUPS.get(widths, 2)", "MOST_GROUPS.get(widths, 3)"),
    Bug("rows of the merge rounded down", "-(-rows // WARPS), self", "rows // WARPS, self"),
    Bug("copies across pages", "min(BLOCK, self._page & -self._page)", "BLOCK"),
    Bug("copies of a block in the kernel of dq", "return min(self.box, PART)", "return self.box"),
    Bug("room of the cache from its pages", "self._table_step * self._page * bool", "self._pages * self._page * bool"),
    Bug(
        "scale twice with a cap", "LOG2E if self._key.cap > 0 else", "LOG2E * self._key.scale if self._key.cap > 0 else"
    ),
    Bug("rate without the scale", "(cap, self._key.scale / cap)", "(cap, 1 / cap)"),
    Bug("scale left out of gradients", "numbers = (self._factor, key.scale", "numbers = (self._factor, 1.0"),
    Bug("inverse rounded down", "-(-(1 << 32) // self.group)", "((1 << 32) // self.group)"),
    Bug("sides of the window exchanged", "window=(given.left, given.right)", "window=(given.right, given.left)"),
    Bug("integers of 64 bits read as 32", "x.dtype == torch.int64)", "x.dtype == torch.int32)"),
    Bug("sinks of any size", "else torch.float32.itemsize", "else 2"),
    Bug("sinks as they are", "if sinks is not None and sinks.dtype != given.q.dtype:", "if sinks is None:"),
    Bug("heads and rows exchanged", "strides[-3], strides[-2]", "strides[-2], strides[-3]"),
    Bug("a plan of few blocks", "min(count * parts, most)", "min(count, most)"),
    Bug(
        "sequences of packed rows",
        "sequences = 1 if len(key.strides) == PACKED_DIMS else key.batch",
        "sequences = key.batch",
    ),
    Bug("rows of one head", "-self._queries * heads * LANES", "-self._queries * LANES"),
    Bug("tiles of keys from queries", "max(-(-self._longest_k // TILE)", "max(-(-self._longest_q // TILE)"),
    Bug("tiles of one head", "-(-self._longest_q * self.group // TILE)", "-(-self._longest_q // TILE)"),
    Bug("boxes of pages for dk", "self._shape(PART))", "self._shape(self.box))"),
    Bug("values by the map of keys", "_map_of(given.v, box, given.q)", "_map_of(given.k, box, given.q)"),
    Bug("boxes of 32 columns", "(1, keys, 1, SPAN)", "(1, keys, 1, SPAN // 2)"),
    Bug("no swizzle", "swizzle=SWIZZLE,", "swizzle=0,"),
    Bug(
        "expanded keys as they are",
        "if strides is not None and 0 in strides:",
        "if strides is not None and 7 in strides:",
    ),
    Bug("empty keys have a map", "if not x.numel():", "if not other.numel():"),
    Bug(
        "strides of the gradient for those of q",
        "*launches.strides, *strides)\n    of_queries",
        "*strides, *strides)\n    of_queries",
    ),
    Bug(
        "strides of q for those of the gradient",
        "*launches.strides, *strides)\n    of_queries",
        "*launches.strides, *launches.strides)\n    of_queries",
    ),
    Bug("states without their sums", "(2 + tile.widths[1])", "2"),
    Bug("one counter for both kernels", "counters.unbind()", "(counters[0], counters[0])"),
    Bug(
        "tiles in rounds for packed sequences",
        "== PACKED_DIMS) and count * parts > most",
        "== PACKED_DIMS) and count < 0",
    ),
    Bug("caches in rounds", "(key.used or len(", "(bool(0) or len("),
    Bug("no counter for its tiles", "if launches.draws else None", "if not launches.draws else None"),
    Bug("sections of one head's bytes", "(self._size + self._size_v)", "self._size"),
    Bug(
        "sections of rows of one head",
        "self._section(self._longest_q * self.group, ",
        "self._section(self._longest_q, ",
    ),
    Bug("blocks of 64 queries", "return PART // self.group", "return PART"),
    Bug("rows of q for the gradient", "_map_of(grad, box, grad)", "_map_of(given.q, box, grad)"),
    Bug("no tile for keys in no sequence", "max(-(-self._longest_k // TILE), 1)", "-(-self._longest_k // TILE)"),
    Bug("merge that starts when it likes", "32 * WARPS, *args, pdl=True)", "32 * WARPS, *args)"),
    Bug("sums of segments have no room", "kept = 4 * width_v if self.groups > 1 else", "kept ="),
    Bug("stages beyond the room", "(SHARED - BARRIERS - self._fixed)", "(SHARED + 65536 - self._fixed)"),
    Bug("rows beyond the room", "(SHARED - BARRIERS - OF_ROWS - self._fixed)", "(SHARED + 32768 - self._fixed)"),
    Bug("output beyond the room", "+ TILE * (2 * max(self.widths) + CHUNK)", "+ TILE * (2 * min(self.widths) + CHUNK)"),
    Bug("width of another size", "next(width for width in WIDTHS if size <= width)", "WIDTHS[-1]"),
    Bug(
        "cap without its kernel",
        "made = program(key.dtype, tile, capped=key.cap > 0)",
        "made = program(key.dtype, tile, capped=False)",
    ),
    Bug(
        "gradients without the cap",
        "made = backward_program(key.dtype, tile, capped=key.cap > 0)",
        "made = backward_program(key.dtype, tile, capped=False)",
    ),
)
PLANNED = (
    Bug("keys nobody asked for", "if into[1] is not None and launches.keys_grid:", "if launches.keys_grid:"),
    Bug(
        "sinks read as if they were contiguous",
        "(None if x is None else x.contiguous() for x in given.others)",
        "(given.sinks, *(None if x is None else x.contiguous() for x in given.others[1:]))",
    ),
)
"""Bugs of what all GPU backends share that their launches show here too."""
