"""Bugs of the kernels of ``cuda-sm90``, planted by someone who had not read the tests; they show on a GPU."""

from __future__ import annotations

from rl_kernels.core.testing import Bug

KERNELS = {
    "attention_sm90.cu": (
        Bug(
            "a warp counts as idle unless its last row is in use",
            "t.row(p, first + mine.row / 16 * 16).query < t.s.used;",
            "t.row(p, first + mine.row / 16 * 16 + 15).query < t.s.used;",
        ),
        Bug(
            "an unsplit tile ends segments after 2048 keys, not 1024",
            "const bool starts = MERGES && n % SEGMENT == 0;",
            "const bool starts = MERGES && n % (2 * SEGMENT) == 0;",
        ),
        Bug(
            "no raise if either of a thread's two sums is small",
            "sum[0] <= SMALL && sum[1] <= SMALL",
            "sum[0] <= SMALL || sum[1] <= SMALL",
        ),
        Bug(
            "clearing of v begins one row too late",
            "clear<BOXES_V, BLOCK, GROUPS>(v, known);",
            "clear<BOXES_V, BLOCK, GROUPS>(v, known + 1);",
        ),
        Bug(
            "finish merges segments in descending order",
            "for (int i = 0; i < AHEAD; ++i) {\n            const Merge merge(",
            "for (int i = AHEAD - 1; i >= 0; --i) {\n            const Merge merge(",
        ),
        Bug(
            "the mask is applied before the softcap",
            (
                "#pragma unroll\n"
                "        for (int i = 0; i < BLOCK / 2; ++i) cap(p.cap, p.rate, d[i]);\n"
                "        if (!seen.all(n)) seen.mask(d, n, -infinity());"
            ),
            (
                "if (!seen.all(n)) seen.mask(d, n, -infinity());\n"
                "#pragma unroll\n"
                "        for (int i = 0; i < BLOCK / 2; ++i) cap(p.cap, p.rate, d[i]);"
            ),
        ),
        Bug(
            "the state of earlier segments survives into the next tile",
            (
                "turns(m.turns, group, GROUPS), d{} {}\n"
                "\n"
                "    __device__ __forceinline__ void run() {\n"
                "        u32 parity = 0;\n"
                "        m.queue.each([&](const Tile& t) {\n"
                "            state = before = State();\n"
                "            merges = false;\n"
            ),
            (
                "turns(m.turns, group, GROUPS), d{}, merges(false) {}\n"
                "\n"
                "    __device__ __forceinline__ void run() {\n"
                "        u32 parity = 0;\n"
                "        m.queue.each([&](const Tile& t) {\n"
                "            state = State();\n"
            ),
        ),
    ),
    "forward.cuh": (
        Bug(
            "out of padded queries is not zeroed",
            "acc[i] = used ? done.of(acc[i]) : 0.0f;",
            "acc[i] = done.of(acc[i]);",
        ),
        Bug(
            "a tile's keys end one query early for odd groups",
            "const int last = min(row(p, ROWS - 1).query, s.used - 1);",
            "const int last = min(row(p, ROWS - p.group).query, s.used - 1);",
        ),
        Bug(
            "the sink is read by KV head, not by query head",
            "const Finished done(p, p.sinks, state.top[half], state.total[half], head);",
            "const Finished done(p, p.sinks, state.top[half], state.total[half], t.head);",
        ),
        Bug(
            "q is read as if its heads were adjacent",
            "p.q, p.q_batch, p.q_row, p.q_head);",
            "p.q, p.q_batch, p.q_row, p.size);",
        ),
    ),
    "states.cuh": (
        Bug(
            "tops are raised per warp instead of per row",
            "const bool exceeds = __fmaf_rn(most, factor, -top) > SLACK;",
            "const bool exceeds = __any_sync(ALL, __fmaf_rn(most, factor, -top) > SLACK);",
        ),
        Bug(
            "rescaling picks the factor by column, not by half",
            "acc[i] = __fmul_rn(acc[i], shrink[i / 2 % 2]);",
            "acc[i] = __fmul_rn(acc[i], shrink[i % 2]);",
        ),
        Bug(
            "out is not rescaled where a sink is the maximum",
            "scale = __fmul_rn(shrink, power), inverse",
            "scale = power, inverse",
        ),
        Bug(
            "a tile's join fuses the other product than finish does",
            "acc[4 * i] = low(x.x, acc[4 * i]), acc[4 * i + 1]",
            "acc[4 * i] = __fmaf_rn(acc[4 * i], low.b, __fmul_rn(x.x, low.a)), acc[4 * i + 1]",
        ),
        Bug(
            "the maximum looks at half of a block's columns",
            "for (int i = 0; i < BLOCK / 4; ++i) {",
            "for (int i = 0; i < BLOCK / 8; ++i) {",
        ),
    ),
    "attention.cuh": (
        Bug(
            "dropped keys are counted modulo a block, not a segment",
            "gone = static_cast<int>(-start % SEGMENT)",
            "gone = static_cast<int>(-start % BLOCK)",
        ),
        Bug(
            "the table's integer width is taken from seqused_k",
            "return p.integer(TABLE, p.table,",
            "return p.integer(USED_K, p.table,",
        ),
        Bug(
            "the unmasked range begins at the first row's window",
            "low_most = t.s.from(p, last),",
            "low_most = t.s.from(p, min(t.row(p, first).query, last)),",
        ),
    ),
    "queue.cuh": (Bug("rounds that go backwards miss one tile", "wide - 1 - mine : mine", "wide - mine : mine"),),
    "attention_backward_sm90.cu": (
        Bug(
            "an lse of -inf is not turned into inf",
            "lse == -infinity() ? infinity() : __fmul_rn(lse, LOG2E);",
            "__fmul_rn(lse, LOG2E);",
        ),
        Bug(
            "delta reads the gradient as if its heads were adjacent",
            "query * p.g_row + head * p.g_head + column;",
            "query * p.g_row + head * p.size_v + column;",
        ),
    ),
    "dq.cuh": (
        Bug(
            "dq's sums are cleared per thread block, not per tile",
            "    m.queue.each([&](const RowTile& t) {\n        float acc[K_WIDTH / 2];\n        zero(acc);\n",
            "    float acc[K_WIDTH / 2];\n    zero(acc);\n    m.queue.each([&](const RowTile& t) {\n",
        ),
        Bug(
            "dq's blocks begin at the window, not at multiples of 64",
            "begin = s.from(p, query) / PART * PART,",
            "begin = s.from(p, query),",
        ),
        Bug(
            "dq clears v's tail in the first 64 columns only",
            "clear<BOXES_V, PART, GROUPS>(m.stage_b(slot.stage), length - n);",
            "clear<1, PART, GROUPS>(m.stage_b(slot.stage), length - n);",
        ),
        Bug(
            "dq does not clear a block that lacks just one key",
            "if (n + PART > length) {",
            "if (n + PART > length + 1) {",
        ),
        Bug(
            "dq is scaled by the softcap's rate",
            "acc[i] = __fmul_rn(acc[i], p.scale);",
            "acc[i] = __fmul_rn(acc[i], CAPPED ? p.rate : p.scale);",
        ),
        Bug(
            "dq of padded queries is not written",
            "return at.query < t.s.count ? static_cast<char*>(p.dq)",
            "return at.query < t.s.used ? static_cast<char*>(p.dq)",
        ),
    ),
    "dkdv.cuh": (
        Bug(
            "dk and dv count blocks from query 0",
            "begin = origin + max(low - origin, 0) / rows * rows;",
            "begin = low / rows * rows;",
        ),
        Bug(
            "the last query that sees a tile of keys is left out",
            "end = clamped(first + HEIGHT + left - s.shift, 0, s.used) * p.group;",
            "end = clamped(first + HEIGHT - 1 + left - s.shift, 0, s.used) * p.group;",
        ),
        Bug(
            "the first query that sees a tile of keys is left out",
            "const int low = clamped(first - right - s.shift, 0, s.used) * p.group;",
            "const int low = clamped(first + 1 - right - s.shift, 0, s.used) * p.group;",
        ),
        Bug(
            "dk's unmasked range ends at the last key's window",
            "all_to = high(begin);",
            "all_to = high(begin + MMA_M - 1);",
        ),
        Bug("dk's softcap slope takes the lse of another row", "of_rows[i / 2 * 8 + k]", "of_rows[i / 4 * 16 + k]"),
        Bug(
            "rows no copy reaches are cleared for q only",
            "BOXES = STAGES * (BOXES_K + BOXES_V);",
            "BOXES = STAGES * BOXES_K;",
        ),
        Bug(
            "one query too many of the gradient is kept",
            "clear<BOXES_V, PART, GROUPS>(m.stage_b(stage), used - r);",
            "clear<BOXES_V, PART, GROUPS>(m.stage_b(stage), used - r + p.group);",
        ),
    ),
    "backward.cuh": (
        Bug(
            "hidden scores are capped in the backward pass",
            "    if (x == -infinity()) return 0.0f;\n    cap(p.cap",
            "    cap(p.cap",
        ),
    ),
}
"""By the file that each of them changes."""
