"""Plausible bugs of a linear_logp kernel, planted in copies of the native backend; the checker must catch each."""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants
from rl_kernels.linear_logp.spec import mutants_cuda, mutants_triton

MODULES = (
    "rl_kernels.core.rowwise",
    "rl_kernels.linear_logp.vocabulary",
    "rl_kernels.linear_logp.kept",
    "rl_kernels.linear_logp.inputs",
    "rl_kernels.linear_logp.packing",
    "rl_kernels.linear_logp.tree",
    "rl_kernels.linear_logp.sums",
    "rl_kernels.linear_logp.backward",
    "rl_kernels.linear_logp.backends.native",
)

LOGITS = "x = products.matmul(block.hidden, block.weight[columns].t())"
DW = "products.chain_dw(dz, hidden, total)"
_LOGITS = (
    Bug("maximum not subtracted", "top = x.amax(-1)", "top = torch.zeros_like(x[:, 0])"),
    Bug("merge without rescaling", "scale = shift.exp()", "scale = torch.ones_like(shift)"),
    Bug(
        "last unit of the vocabulary skipped",
        "for columns in slices(len(block.weight), UNIT):",
        "for columns in [*slices(len(block.weight), UNIT)][: max(len(block.weight) // UNIT, 1)]:",
    ),
    Bug(
        "last K step skipped",
        LOGITS,
        "x = products.matmul(block.hidden[:, :-16], block.weight[columns, :-16].t())",
    ),
    Bug(
        "library product instead of fixed blocks",
        LOGITS,
        "x = block.hidden.float() @ block.weight[columns].float().t()",
    ),
    Bug(
        "units follow the rows",
        "slices(len(block.weight), UNIT)",
        "slices(len(block.weight), UNIT if block.hidden.shape[0] > 4 else 2 * UNIT)",
    ),
    Bug("logits rounded to BF16", LOGITS, f"{LOGITS}.bfloat16().float()"),
    Bug(
        "cap after the temperature",
        "return x if block.cap is None else block.cap(x)",
        "return x if block.cap is None else block.cap(x / block.temperature.max()) * block.temperature.max()",
    ),
    Bug("logits not capped", "return x if block.cap is None else block.cap(x)", "return x"),
    Bug(
        "cap not differentiated",
        "if block.cap is not None:\n            gradient *=",
        "if False:\n            gradient *=",
    ),
    Bug("cap differentiated without its scale", ".mul_(self.softcap * self.rate)", ""),
    Bug(
        "cap taken for the rate",
        "Cap(*self.cap_numbers.tolist())",
        "Cap(self.cap_numbers[0].item(), 1 / self.cap_numbers[0].item())",
    ),
    Bug("bias added twice", "x += block.bias[columns]", "x += 2 * block.bias[columns]"),
    Bug(
        "temperature missing in forward",
        "yield rowwise.softmax_state(x, rowwise.per_row(block.temperature, x)",
        "yield rowwise.softmax_state(x, torch.ones_like(x[:, :1])",
    ),
    Bug(
        "temperatures of the first block",
        "self.temperature[rows] if",
        "self.temperature[: len(self.target_ids[rows])] if",
    ),
    Bug(
        "only the first block of rows",
        "total[rows] = value",
        "total[rows] = value * (not rows.start)",
    ),
)
_TARGETS = (
    Bug("ids off by one", "rowwise.select(x, block.target_ids,", "rowwise.select(x, block.target_ids + 1,"),
    Bug("target after a piece's last column counted there too", "(column < z.shape[1])", "(column <= z.shape[1])"),
    Bug(
        "target of every piece in backward",
        "first = block.start + columns.start\n",
        "first = 0\n",
    ),
    Bug("every negative id is ignored, no other", "self.target_ids != self.ignore_index", "self.target_ids >= 0"),
    Bug("hidden of ignored rows read", "hidden = inputs.keep(inputs.hidden)", "hidden = inputs.hidden"),
    Bug("mask missing in backward", "block.target_ids == block.ignore_index", "block.target_ids < -block.vocab"),
    Bug("ignored rows read the weight", "dhidden.masked_fill_(", "dhidden.masked_fill("),
)
_GRADIENTS = (
    Bug(
        "temperature missing in backward",
        "return _divide(dz, temperature)",
        "return dz",
    ),
    Bug("gradient through entropy dropped", "if up.grad_entropy is not None and up.entropy is not None:", "if False:"),
    Bug(
        "last tokens of dW skipped",
        DW,
        DW.replace("dz, hidden", "dz[: len(dz) // 16 * 16], hidden[: len(dz) // 16 * 16]"),
    ),
    Bug("dW of the first columns alone", DW, DW.replace("hidden, total", "hidden[:, :16], total[:, :16]")),
    Bug("dW does not continue its buffer", "in_turn = part.start > 0 or sums", "in_turn = sums"),
    Bug("last joined chain left out", "total.add(chain)\n", "total.add(chain) if rows.stop < count else None\n"),
    Bug("joined chain of the bias not begun anew", "self.bias.zero_()\n", "pass\n"),
    Bug("blocks of rows cut steps of dW", "max(height // BLOCK, 1) * BLOCK", "max(height, 1)"),
    Bug("dH not initialised", "continues=part.start > 0", "continues=True"),
    Bug("kept logits of the next unit", "- first : columns.stop - first]", "- first :].roll(-UNIT, 1)[:, : UNIT]"),
    Bug("logits kept before the cap", "kept_part.copy_(x)", "kept_part.copy_(x * 1.01)"),
    Bug("kept logits taken for all pieces", "or columns.start < first:", "or self.kept.shape[1] < 1:"),
    Bug("kept columns of the first rows", "kept = None if self.kept is None else self.kept[rows]", "kept = self.kept"),
    Bug("last segment left out", "for segment in segments:", "for segment in segments[: max(len(segments) - 1, 1)]:"),
    Bug("sum without a sibling left out", "            left += total\n", ""),
    Bug(
        "dW buffer kept between calls",
        "out.new_zeros(out.shape, dtype=rowwise.compute_dtype(out.dtype))",
        "globals().setdefault(out.shape, out.new_zeros(out.shape, dtype=torch.float32))",
    ),
)

MUTANTS = (
    Mutants("native", MODULES, (*_LOGITS, *_TARGETS, *_GRADIENTS)),
    *mutants_cuda.MUTANTS,
    *mutants_triton.MUTANTS,
)
