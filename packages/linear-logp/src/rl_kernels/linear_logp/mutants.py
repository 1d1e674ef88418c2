"""Bugs that a writer of a linear_logp kernel might make, planted in copies of the native backend; none may escape."""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

MODULES = (
    "rl_kernels.core.rowwise",
    "rl_kernels.linear_logp.logits",
    "rl_kernels.linear_logp.backward",
    "rl_kernels.linear_logp.native",
)

_LOGITS = (
    Bug("maximum not subtracted", "top = z.amax(-1)", "top = torch.zeros_like(z[:, 0])"),
    Bug("merge without rescaling", "scale = shift.exp()", "scale = torch.ones_like(shift)"),
    Bug("last piece of the vocabulary skipped", "for columns in others:", "for columns in others[:-1]:"),
    Bug(
        "last K step skipped",
        "left[row : row + BLOCK].double().contiguous() @ slab",
        "left[row : row + BLOCK, :-STEP].double().contiguous() @ slab[:-STEP]",
    ),
    Bug(
        "library product in place of fixed blocks",
        "return _product(x, weight.shape[0]",
        "return x.to(compute_dtype(x.dtype)) @ weight.to(compute_dtype(x.dtype)).t()\n    return _product(x, 0",
    ),
    Bug(
        "pieces follow the rows",
        "slices(block.weight.shape[0], PIECE)",
        "slices(block.weight.shape[0], PIECE if block.hidden.shape[0] > 4 else 2 * PIECE)",
    ),
    Bug("logits rounded to BF16", "self.weight[columns])\n", "self.weight[columns]).bfloat16().float()\n"),
    Bug("bias added twice", "z += self.bias[columns]", "z += 2 * self.bias[columns]"),
    Bug("temperature missing in forward", "return z.div_(rowwise.per_row(self.temperature, z))", "return z"),
    Bug(
        "temperatures of the first block",
        "self.temperature[rows] if",
        "self.temperature[: len(self.target_ids[rows])] if",
    ),
    Bug(
        "only the first block of rows",
        "total[rows] = block.keep(value)",
        "total[rows] = block.keep(value) * (not rows.start)",
    ),
)
_TARGETS = (
    Bug("ids off by one", "rowwise.select(z, block.target_ids)\n", "rowwise.select(z, block.target_ids + 1)\n"),
    Bug("target after a piece's last column counted there too", "(column < z.shape[1])", "(column <= z.shape[1])"),
    Bug("target of every piece in backward", "dlogits(z, upstream, columns.start)", "dlogits(z, upstream)"),
    Bug("every negative id is ignored, no other", "self.target_ids != self.ignore_index", "self.target_ids >= 0"),
    Bug("hidden of ignored rows read", "return block._replace(hidden=block.keep(block.hidden))", "return block"),
    Bug("mask missing in backward", "return block.keep(torch.where(bad[:, None]", "return (torch.where(bad[:, None]"),
    Bug("ignored rows read the weight", "dhidden.masked_fill_(", "dhidden.masked_fill("),
)
_GRADIENTS = (
    Bug("temperature missing in backward", ".div_(rowwise.per_row(block.temperature, z))", ""),
    Bug("gradient through entropy dropped", "if up.grad_entropy is not None and up.entropy is not None:", "if False:"),
    Bug(
        "last tokens of dW skipped",
        "for row in range(0, a.shape[0], STEP):",
        "for row in range(0, a.shape[0] - STEP + 1, STEP):",
    ),
    Bug("dW of the first slab alone", "range(0, out.shape[1], SLAB)", "range(0, min(out.shape[1], SLAB), SLAB)"),
    Bug("dW does not continue its buffer", "block.hidden, sums.dweight)", "block.hidden, sums.dweight.zero_())"),
    Bug("blocks of rows cut steps of dW", "max(height // rowwise.BLOCK, 1) * rowwise.BLOCK", "max(height, 1)"),
    Bug("dH not initialised", "dhidden = hidden.new_zeros(", "dhidden = hidden.new_empty("),
    Bug(
        "dW buffer kept between calls",
        "return weight.new_zeros(weight.shape, dtype=rowwise.compute_dtype(weight.dtype))",
        "return globals().setdefault(weight.shape, weight.new_zeros(weight.shape, dtype=torch.float32))",
    ),
)

MUTANTS = (Mutants("native", MODULES, (*_LOGITS, *_TARGETS, *_GRADIENTS)),)
