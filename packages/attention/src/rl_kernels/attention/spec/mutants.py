"""Bugs that an author of an attention kernel might make, planted in copies of the backends; tests must find each."""

from __future__ import annotations

from rl_kernels.attention.spec import mutants_triton
from rl_kernels.core.testing import Bug, Mutants

MODULES = ("rl_kernels.core.rowwise", "rl_kernels.attention.sinks", "rl_kernels.attention.backends.native")
_STATE = (
    Bug("accumulator not rescaled", "mixed = mixed * keep + _product", "mixed = mixed + _product"),
    Bug("sum not rescaled", "total = total * keep + rowwise", "total = total + rowwise"),
    Bug("first of two states not rescaled", "left[2] * a + right[2] * b", "left[2] + right[2] * b"),
    Bug(
        "segments of one sequence alone merged in descending order",
        "for segment in range(seen.first // SEGMENT * SEGMENT, seen.end, SEGMENT)",
        "for segment in range(seen.first // SEGMENT * SEGMENT, seen.end, SEGMENT)[:: 1 if given.batch > 1 else -1]",
    ),
    Bug(
        "weights not rounded",
        "_product(_rounded(weights, given), _block(values, key))",
        "_product(weights.bfloat16(), _block(values, key))",
    ),
    Bug(
        "a row's sum follows its place in the tile",
        "rowwise.row_sum(weights)[..., None]",
        "(rowwise.row_sum(weights) * (1 + 2e-7 * (seen.rows % 3 == 1)))[..., None]",
    ),
    Bug(
        "segment follows the length",
        "for segment in range(seen.first // SEGMENT * SEGMENT, seen.end, SEGMENT):\n",
        "for segment in range(seen.first // SEGMENT * SEGMENT, seen.end, SEGMENT if seen.end > 128 else 64):\n",
    ),
    Bug(
        "a query that sees nothing is NaN",
        "torch.where(total == 0, 0.0, mixed / torch.where(total == 0, 1.0, total))",
        "mixed / total",
    ),
    Bug("lse without the maximum", "top + total.log())", "total.log())"),
)
_MASKS = (
    Bug("a query sees one key too many", "(position + given.right + 1).clamp", "(position + given.right + 2).clamp"),
    Bug("window one key short", "(position - given.left).clamp", "(position - given.left + 1).clamp"),
    Bug(
        "queries stand at the first keys",
        "position = sequence.length - sequence.count + self.rows // given.group",
        "position = self.rows // given.group",
    ),
    Bug(
        "last block of keys left out",
        "self.end = sequence.length if given.right == UNLIMITED else",
        "self.end = max(sequence.length - 1, 1) // 64 * 64 if given.right == UNLIMITED else",
    ),
    Bug(
        "block of the window's start left out",
        "range(max(segment, seen.first // BLOCK * BLOCK)",
        "range(max(segment, -(-seen.first // BLOCK) * BLOCK)",
    ),
    Bug(
        "blocks counted from the padding",
        "yield _Sequence(queries, count, (b, slice(low, high)), gone + high - low, None, given.group, gone)",
        "yield _Sequence(queries, count, (b, slice(0, high)), gone + high, None, given.group, gone)",
    ),
    Bug(
        "blocks counted from the first key that is left",
        "max(-first[b], 0) % SEGMENT",
        "0",
    ),
    Bug(
        "keys that are gone are seen",
        "(position - given.left).clamp(min=gone)",
        "(position - given.left).clamp(min=0)",
    ),
    Bug("keys beyond those in use are seen", "min(max(used_k[b], 0), given.k.shape[1])", "given.k.shape[1]"),
    Bug(
        "keys beyond the last page's are seen",
        "length = min(max(used, 0), given.block_table.shape[1] * size * bool(pages))",
        "length = -(-used // size) * size",
    ),
    Bug(
        "pages in the order of memory",
        "page = given.block_table[b, key // size].long()",
        "page = given.block_table[b].sort().values[key // size].long().clamp(0)",
    ),
    Bug("queries not in use are computed", "min(max(used_q[b], 0), count)", "count"),
)
_SCORES = (
    Bug(
        "scale applied twice",
        "score = _product(queries, keys.mT) * given.scale",
        "score = _product(queries, keys.mT) * given.scale**2",
    ),
    Bug(
        "cap without its derivative",
        "return given.softcap * bent, 1 - bent * bent",
        "return given.softcap * bent, None",
    ),
    Bug(
        "cap of the raw score",
        "bent = (score / given.softcap).tanh()",
        "bent = (score / given.scale / given.softcap).tanh()",
    ),
    Bug("sink takes part twice", "total * keep + (extra - base).exp()", "total * keep + 2 * (extra - base).exp()"),
    Bug("sinks of another head", "extra[:, seen.rows % given.group]", "extra[:, (seen.rows + 1) % given.group]"),
    Bug("sink does not move the accumulator", "(extra - base).exp(), mixed * keep", "(extra - base).exp(), mixed"),
)
_GRADIENTS = (
    Bug("delta left out", "(_product(above, mixed.mT) - _block(delta, first))", "_product(above, mixed.mT)"),
    Bug("scale left out of dq", "total * given.scale)", "total)"),
    Bug("scale in dv", "(1.0 if place else given.scale)", "given.scale"),
    Bug(
        "dk of one query head of a group left out",
        "totals[0][:, part] += _product(dscore.mT, rows)",
        "totals[0][:, part] += _product(dscore.mT * (seen.rows % given.group < max(given.group - 1, 1)), rows)",
    ),
    Bug("rows counted from the padding", "range(sequence.first_query(given.right) * given.group, ", "range(0, "),
    Bug("gradient of sinks of the wrong sign", "return -terms", "return terms"),
    Bug(
        "gradient of sinks of queries not in use", "torch.where(lse == -torch.inf, 0.0, share * delta)", "share * delta"
    ),
)

MUTANTS = (Mutants("native", MODULES, (*_STATE, *_MASKS, *_SCORES, *_GRADIENTS)), *mutants_triton.MUTANTS)
