"""Bugs in known statistics, the loss by chunks and joined chains, planted in copies of modules that all backends share.

The cases of the checker make one call each, or see no order of a sum, so the tests of these forms must show them
(``tests/test_known.py``, ``tests/test_loss.py``, ``tests/test_joined.py``).
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug

MODULES = tuple(
    f"rl_kernels.linear_logp.{name}"
    for name in (
        *("known", "arguments", "sums", "backward", "backends.native"),
        *("autograd", "chunks", "forming", "loss", "api"),
    )
)

GIVEN = "given = hidden[rows], weight, ids[rows], bias, scale"
KNOWN = (
    Bug("norm reversed", "flat(self.norm, 2), *others", "flat(self.norm, 2).flip(0), *others"),
    Bug("known results at ignored rows", "torch.where(active.view", "torch.where(torch.ones_like(active).view"),
    Bug(
        "logsumexp and entropy exchanged",
        "[self.logsumexp.clone(), self.entropy.clone()]",
        "[self.entropy.clone(), self.logsumexp.clone()]",
    ),
    Bug("ids of the first rows checked", GIVEN, "given = hidden[rows], weight, ids[: len(rows)], bias, scale"),
    Bug("bias left out of the check", GIVEN, "given = hidden[rows], weight, ids[rows], None, scale"),
    Bug("another temperature in the check", GIVEN, "given = hidden[rows], weight, ids[rows], bias, 1.01 * scale"),
    Bug("forward pass not left out", "if known is not None:\n        return", "if False:\n        return"),
)
"""Bugs of known statistics that give wrong numbers, a false alarm, or a forward pass."""
CHECK = (
    Bug("nothing is compared", "if not bool(torch.stack", "if True or not bool(torch.stack"),
    Bug(
        "last statistic not compared", "for value in apart.values()]).any", "for value in [*apart.values()][:-1]]).any"
    ),
    Bug("a distance of one passes", "(a - b).abs().clamp(min=1)", "(a - b).abs() // 2"),
    Bug("row of the call taken for that of the check", "row {int(rows[index])}", "row {index}"),
    Bug("ignored rows drawn", "numbers = (target_ids != ignore_index)", "numbers = (target_ids == ignore_index)"),
    Bug("last rows never drawn", "(draws * size).long()", "(draws * size * 0.9).long()"),
    Bug("one seed for all calls", "manual_seed(seed)\n", "manual_seed(0)\n"),
)
"""Bugs of the comparison with rows that are formed again."""
LOSS = (
    Bug("chain cut anywhere", "start // step * step", "start"),
    Bug("last rows of a chunk lost", "else end // step * step", "else end // step * step - step"),
    Bug("last rows of the batch lost", "end if end == total else", "end // step * step if end == total else"),
    Bug(
        "log-probs of the rows before",
        "own = [value[chunk.tokens.start - rows.start :]",
        "own = [value[: chunk.tokens.stop - chunk.tokens.start]",
    ),
    Bug(
        "upstream gradient of 1", "scale = torch.full_like(losses, self.grad_scale)", "scale = torch.ones_like(losses)"
    ),
    Bug(
        "upstream gradients of the first rows",
        "grads = [value[here] for value in upstream]",
        "grads = [value[:count] for value in upstream]",
    ),
    Bug(
        "no upstream gradients of other statistics",
        "for into, grad in zip(upstream, grads, strict=True)",
        "for into, grad in zip(upstream[:1], grads[:1], strict=True)",
    ),
    Bug("norm of the last rows", "saved = norm[:count]", "saved = norm[-count:]"),
    Bug("kept logits of the last rows", "kept[:count] if kept.shape[1]", "kept[-count:] if kept.shape[1]"),
    Bug(
        "entropy of the last rows",
        "None if entropy is None else entropy[:count]",
        "None if entropy is None else entropy[-count:]",
    ),
    Bug(
        "temperatures of the first rows",
        "scale = temperature[rows] if temperature.ndim else temperature\n        return",
        "scale = temperature[: rows.stop - rows.start] if temperature.ndim else temperature\n        return",
    ),
    Bug(
        "gradient of hidden written to the first rows",
        "self._dhidden[here] = dhidden",
        "self._dhidden[:count] = dhidden",
    ),
    Bug(
        "sum of the last chunk",
        "self._main_grad = weight.new_zeros(weight.shape, dtype=wide)",
        "self._main_grad = None",
    ),
    Bug(
        "bias of the last chunk",
        "self._bias_total = weight.new_zeros(len(weight), dtype=wide)",
        "self._bias_total = None",
    ),
    Bug("sum in 16 bits", "weight.new_zeros(weight.shape, dtype=wide)", "weight.new_zeros(weight.shape)"),
    Bug(
        "total of the bias begins anew",
        "    dbias = bias_total\n",
        "    dbias = bias_total.zero_() if bias_total is not None else None\n",
    ),
    Bug("losses of the last chunk", "row_sum(torch.cat(found))", "row_sum(found[-1])"),
    Bug("offsets of the batch", "own = [offset - offsets[first]", "own = [offset"),
    Bug("shape of packed tokens", "value if self.length is None else value.view(count, self.length)", "value"),
    Bug("gradient of the weight twice", "None if self._into_main_grad else dweight", "dweight"),
)
"""Bugs of the loss by chunks."""
CHAIN = "self._chain(rows, columns, chain,"
CHAINS = "slices(count, self.totals.join_tokens)"
BUFFER = "            return self.main_grad[columns]"
JOINED = (
    Bug("one chain", "if self.totals.join_tokens is None:", "if True:"),
    Bug("chain begins at the total", "chain.begin()\n", "chain.begin() or chain.add(total)\n"),
    Bug("a chain continues the one before", "in_turn = part.start > 0 or sums", "in_turn = rows.start > 0 or sums"),
    Bug("chain of the bias not begun anew", "self.bias.zero_()\n", "pass\n"),
    Bug("bias not joined", "chain = total.room()", "chain = total.room()._replace(bias=total.bias)"),
    Bug("chains added in another order", CHAINS, f"[*{CHAINS}][::-1]"),
    Bug("last chain not added", "total.add(chain)\n", "total.add(chain) if rows.stop < count else None\n"),
    Bug("only the weight is added", "zip(self[:2], chain[:2]", "zip(self[:1], chain[:1]"),
    Bug("total not begun at 0", "return total.zero_() if is_joined else total", "return total"),
    Bug("total in 16 bits", "(in_blocks or is_joined) and total", "in_blocks and total"),
    Bug("main_grad overwritten", BUFFER, f"{BUFFER}.zero_()"),
    Bug("rows of the chains before added again", CHAIN, "self._chain(slice(0, rows.stop), columns, chain,"),
    Bug("a chain as long as a block", CHAINS, "slices(count, self.height)"),
    Bug("hidden of the first rows", "_part(hidden, rows), sums", "hidden[: rows.stop - rows.start], sums"),
    Bug("length not handed to backward", "needed, ctx.join_tokens", "needed, None"),
)
"""Bugs of chains that are joined; most give another order of the same sum."""
