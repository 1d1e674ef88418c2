"""Bugs of the host code of det_gemm's backend ``cuda-sm90``, planted in copies of it.

``SHOWN`` give wrong numbers, which the quick cases show on a GPU. ``LAUNCHES`` read or write out of bounds, need larger
cases, or break a rule without changing a number: tests that record launches, and make none, show them.
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

MODULES = (
    *(f"rl_kernels.core.cuda.gemm.{name}" for name in ("schedule", "segmented", "matmul")),
    "rl_kernels.det_gemm.backends.cuda_sm90.backend",
)

SHOWN = (
    Bug("bias along the other dim of swapped tiles", "target.t(), BY_ROW + BY_COLUMN - along", "target.t(), along"),
    Bug("bias left out", "0 if bias is None else plan.along, plan.length", "0, plan.length"),
    Bug("last terms of K skipped", "(rows, columns, k, cut.group)", "(rows, columns, k // 16 * 16, cut.group)"),
    Bug(
        "dtype code of BF16 and FP16 exchanged",
        "torch.bfloat16: 1, torch.float16: 2",
        "torch.bfloat16: 2, torch.float16: 1",
    ),
    Bug("segments off by 16 terms", "plan.along, plan.length)", "plan.along, plan.length + 16)"),
    Bug("bias of a segmented product left out", "matmul(a, b, out, bias=bias, segments", "matmul(a, b, out, segments"),
    Bug("dtype of the output taken for that of the operands", '"OUT": CODES[out_dtype]', '"OUT": CODES[dtype]'),
    Bug("weight gradient of the tokens reversed", "matmul(a.t(), dc, out)\n", "matmul(a.flip(0).t(), dc, out)\n"),
)
"""Bugs that give wrong numbers."""

LAUNCHES = (
    Bug("half of the segments", '"SEGMENTS": cut.segments', '"SEGMENTS": max(cut.segments // 2, 1)'),
    Bug("one block of a cluster", '"CLUSTER": cut.cluster', '"CLUSTER": 1'),
    Bug("a block for each tile of a cluster", "else tiles * cut.cluster", "else tiles"),
    Bug("sums wait in registers that are not there", '"FAR": cut.far', '"FAR": 0'),
    Bug("scratch memory of one block", "cut.sums * _blocks(cut, rows, columns, multiprocessors)", "cut.sums"),
    Bug("what blocks have merged stored in boxes", "% 16 == 0 and self.cluster == 1", "% 16 == 0"),
    Bug("operands of any strides cut into segments", "if segments > 1 and PLAIN in majors:", "if False:"),
    Bug("chain begins anew", '"CONTINUES": int(continues)', '"CONTINUES": 0'),
    Bug(
        "bias along the other dim of a transposed output",
        "right, left, target.t(), BY_ROW, n, m",
        "right, left, target.t(), BY_COLUMN, n, m",
    ),
    Bug("bias read as it lies", "bias = bias.contiguous()", "pass"),
    Bug("swapped operands, strides as they were", "*left.strides, *right.strides", "*right.strides, *left.strides"),
    Bug("strides of the output exchanged", "(*target.strides, *left", "(*target.strides[::-1], *left"),
    Bug("strides in bytes", "*target.strides, *left.strides", "*target.strides, *(2 * s for s in left.strides)"),
    Bug(
        "output not transposed with its operands",
        "turned = (flipped, not flipped, flipped)",
        "turned = (flipped, not flipped, False)",
    ),
    Bug(
        "majors of swapped operands as they were",
        "not flipped, majors[::-1]",
        "not flipped, majors",
    ),
    Bug("one block for all", "min(tiles, multiprocessors)", "1"),
    Bug("more blocks than processors", "min(tiles, multiprocessors)", "tiles"),
    Bug("blocks of consumers alone", "(cut.consumers + 1) * THREADS", "cut.consumers * THREADS"),
    Bug("units of the unswapped product", "tiles = cut.units(rows, columns)", "tiles = cut.units(columns, rows)"),
    Bug(
        "box of the left tile for the right one",
        "_operand(right, majors[1], cut.columns",
        "_operand(right, majors[1], cut.rows",
    ),
    Bug("weights stay in the cache", "PROMOTION_ONCE if cut.swapped else PROMOTION", "PROMOTION"),
    Bug(
        "clusters of narrow tiles begin early", "self.cluster > 1 and self.columns > PLAIN_COLUMNS", "self.cluster > 1"
    ),
    Bug("every launch waits", "pdl=plan.pdl", "pdl=False"),
    Bug("every launch begins early", "pdl=plan.pdl", "pdl=True"),
    Bug(
        "shared memory of a box for one of 64 columns",
        "-(-self.columns // BOX) * BOX if right == MN_MAJOR else self.columns",
        "self.columns",
    ),
    Bug("no room for boxes", "max(BOXES if self.in_boxes else 0, self.near * self.sums)", "self.near * self.sums"),
    Bug("no room for sums that wait", "max(BOXES if self.in_boxes else 0, self.near * self.sums)", "BOXES"),
    Bug("no room for the rows that an instruction reads beyond a tile", "(ROWS - self.rows) * SWIZZLE", "0"),
    Bug("no room for the alignment of the swizzle", "+ self.behind + 1024", "+ self.behind"),
    Bug(
        "one stage too many",
        "return min((ROOM - self.behind) // self.stage_bytes(right), DEEPEST)",
        "return min((ROOM - self.behind) // self.stage_bytes(right) + 1, DEEPEST)",
    ),
    Bug("product of the operands as they were", "(b, a) if plan.flipped", "(a, b) if plan.flipped"),
    Bug("map of the operand as it was", "(False, _strides(x), (rows", "(True, _strides(x), (rows"),
    Bug("alignment of an address in elements", "a.data_ptr() % ALIGNED", "a.data_ptr() % (ALIGNED // 2)"),
    Bug("alignment of the output in elements", "out.data_ptr() % ALIGNED", "out.data_ptr() % (ALIGNED // 2)"),
    Bug("strides of columns that are apart", "rows > 1 and inner == 1:", "rows > 1:"),
    Bug("alignment left out of what a launch follows", "a.data_ptr() % ALIGNED == 0)", "True)"),
    Bug("alignment of b left out", "b.data_ptr() % ALIGNED == 0)", "True)"),
    Bug("alignment of the output left out", "out.data_ptr() % ALIGNED == 0)", "True)"),
    Bug(
        "stages of the other operand",
        "cut.shared(majors[1])",
        "cut.shared(majors[0])",
    ),
    Bug("box of an unaligned address", "rows and columns and x.aligned) or (inner", "rows and columns) or (inner"),
    Bug("box of rows at any pitch", "outer >= columns and outer * x.dtype.itemsize % ALIGNED == 0", "outer >= columns"),
    Bug(
        "alignment of rows in elements",
        "outer * x.dtype.itemsize % ALIGNED == 0",
        "outer * 2 * x.dtype.itemsize % ALIGNED == 0",
    ),
    Bug("box of rows that overlap", "outer >= columns and outer * x", "outer * x"),
    Bug("box of columns that are apart", " or (inner != 1 and columns != 1)", ""),
    Bug(
        "box with the stride of a single row as it is",
        "(outer if rows > 1 else -(-columns // per) * per, 1)",
        "(outer, 1)",
    ),
    Bug("box of an operand that is not there", "not (rows and columns and x.aligned)", "not x.aligned"),
    Bug("box of a transposed operand for one that is not", "(BOX, ROWS), SWIZZLE", "(ROWS, 2 * BOX), SWIZZLE"),
    Bug("no swizzle", "(BOX, ROWS), SWIZZLE", "(BOX, ROWS), 0"),
    Bug("FP32 stored in a transposed box", "_has_map(target.t()) and size == HALF", "_has_map(target.t())"),
    Bug(
        "output in boxes of any tile",
        "return self.rows >= ROWS and self.columns % 16 == 0",
        "return self.columns % 16 == 0",
    ),
    Bug(
        "box of the output of another width",
        "(ROWS, width // size)",
        "(ROWS, 16)",
    ),
    Bug("widest swizzle for any tile", "next(width for width in (128, 64, 32) if size % width == 0)", "128"),
    Bug("plain operands in long stages", "inner=BOX, turns=False)", "turns=False)"),
    Bug("rows of a tile for the columns of few", "if not one.schedule.swapped or one.schedule.columns >= m]", "]"),
    Bug("64 rows are many", "one.schedule.swapped == (m <= FEW)", "one.schedule.swapped == (m < FEW)"),
    Bug("variants with and without a chain that goes on are one", '"CONTINUES": int(continues)', '"CONTINUES": 1'),
)
"""Bugs that only a recorded launch shows."""

PLANNED = (
    Bug("segments of the sum over K for those over N", "segments=self._segments[1]", "segments=self._segments[0]"),
    Bug("segments of a plan lost", "segments=self._segments[0]", "segments=1"),
    Bug("gradient launched that has no plan", "if not of_input.possible:", "if False:"),
    Bug("bias of a plan lost", "0 if bias is None else plan.along", "0"),
    Bug("operands of a plan as they were", "(b, a) if plan.flipped", "(a, b) if plan.flipped"),
    Bug("maps of a plan as they were", "(right, left, target) if self._plan.flipped", "(left, right, target) if False"),
    Bug("unaligned addresses launched", "if (of_left | of_right | of_out) % ALIGNED:", "if False:"),
    Bug("alignment of the weight not looked at", "(of_left | of_right | of_out)", "(of_left | of_out)"),
    Bug(
        "map of the first address",
        "found.append(known.get(tensor.data_ptr()) or",
        "found.append(next(iter(known.values()), 0) or",
    ),
    Bug("maps of all operands in one", "key = box, x.shape, x.stride(), x.dtype", "key = x.dtype"),
    Bug("chain of a plan begins anew", 'else ("continued", True)', 'else ("weight", False)'),
    Bug("one product for both weight gradients", 'else ("continued", True)', 'else ("weight", True)'),
    Bug("dc not turned", "a_turned=True, continues", "continues"),
    Bug("weight not turned", "out, bias, b_turned=True", "out, bias"),
    Bug("operands of any type", "not are_plain(dc, x, weight)", "not are_plain(dc)"),
    Bug("strides of dc not looked at", " or not dc.is_contiguous()", ""),
    Bug("shape of dc not looked at", "dc.shape != self._shape or ", ""),
    Bug("dtype of dc not looked at", "dc.dtype == x.dtype == weight.dtype", "x.dtype == weight.dtype"),
    Bug("dtype of a stored weight not looked at", "dc.dtype == x.dtype == weight.dtype", "dc.dtype == x.dtype"),
    Bug("stored x of other strides", "(x.shape, x.stride()) != self._x", "x.shape != self._x[0]"),
    Bug("stored weight of other strides", "(weight.shape, weight.stride()) != self._weight", "False"),
    Bug("half of a backward pass launched", "addresses % ALIGNED", "False"),
    Bug("stored x at any address", "addresses |= x.data_ptr() | dw.data_ptr()", "addresses |= dw.data_ptr()"),
    Bug("buffer of any strides", " or not (into is None or into.is_contiguous())", ""),
    Bug("buffer at any address", "addresses |= x.data_ptr() | dw.data_ptr()", "addresses |= x.data_ptr()"),
    Bug("rows that would be copied", "stride == size * inner", "True"),
    Bug("full at every address", "            _kept = 0\n", ""),
    Bug("gradient of any type", "not are_plain(dc, x, weight)", "not are_plain(x, weight)"),
    Bug("rows of any type", "not are_plain(a, b)", "not are_plain(b)"),
    Bug("weight of any type", "not are_plain(a, b)", "not are_plain(a)"),
    Bug("dtypes that differ", "a.dtype != b.dtype or ", ""),
    Bug("one plan for every length", "segments, length)\n        product", "segments)\n        product"),
    Bug("length of a rank's segments", "(segments, length),", "(segments, left.shape[1]),"),
    Bug("one plan for both dtypes of the sum", "out.dtype, bias is None", "bias is None"),
    Bug("one plan with and without bias", "bias is None, segments, length", "segments, length"),
    Bug("one plan for every number of segments", "bias is None, segments, length", "bias is None, length"),
    Bug("one plan for all rows", "key = (a.shape, a.stride()", "key = (a.stride()"),
    Bug("one plan for a weight and its transpose", "b.shape, b.stride(), out", "out"),
    Bug("bias of any strides", "(bias is None or bias.is_contiguous())", "True"),
    Bug(
        "gradient in the shape of rows",
        "dc.new_empty(self._x[0])",
        "dc.new_empty((dc.numel() // dc.shape[-1], self._x[0][-1]))",
    ),
)
"""Bugs of planned launches, shown by test_planned.py."""

MUTANTS = (Mutants("cuda-sm90", MODULES, SHOWN),)
