"""Bugs that an author of an attention kernel might make, planted in copies of the backends; tests must find each."""

from __future__ import annotations

from rl_kernels.attention.spec import mutants_triton
from rl_kernels.core.testing import Bug, Mutants

MODULES = (
    "rl_kernels.core.rowwise",
    "rl_kernels.attention.sinks",
    "rl_kernels.attention.backends.native.places",
    "rl_kernels.attention.backends.native.batches",
    "rl_kernels.attention.backends.native.backend",
)
_STATE = (
    Bug(
        "blocks of one sequence alone added in descending order",
        "for block in later:",
        "for block in later[:: 1 if heads > 2 else -1]:",
    ),
    Bug("blocks of few rows added in descending order", "for product in others:", "for product in others[::-1]:"),
    Bug("last block of keys not added", "for product in others:", "for product in others[:-1]:"),
    Bug("weights rounded", ".clamp_(min=LEAST).exp_()", ".clamp_(min=LEAST).exp_().bfloat16().float()"),
    Bug("weights not less than e^-8", ".clamp_(min=LEAST).exp_()", ".clamp_(min=-8).exp_()"),
    Bug(
        "a row's sum follows its place in the tile",
        "found.append((out, total, top))",
        "found.append((out, total * (1 + 2e-7 * (torch.arange(total.shape[1])[:, None] % 3 == 1)), top))",
    ),
    Bug("blocks follow the length", "if keys == BLOCK:", "if keys > 2 * BLOCK or keys == BLOCK:"),
    Bug("a query that sees nothing is NaN", "masked_fill_(total == 0, 0.0)", "masked_fill_(total < 0, 0.0)"),
    Bug("lse without the maximum", "total.log() + top", "total.log()"),
    Bug(
        "maximum of the block of rows",
        "top = seen.without_hidden(score).amax(2, keepdim=True)",
        "top = seen.without_hidden(score).amax((1, 2), keepdim=True).expand(-1, score.shape[1], 1).clone()",
    ),
)
_MASKS = (
    Bug("a query sees one key too many", "(key > query + shift + right)", "(key > query + shift + right + 1)"),
    Bug("window one key short", "(key < query + shift - left)", "(key < query + shift - left + 1)"),
    Bug("queries stand at the first keys", "(key > query + shift + right)", "(key > query + right)"),
    Bug("the last key is hidden", "hidden = (key >= length).expand", "hidden = (key >= length - 1).expand"),
    Bug(
        "last block of keys left out",
        "end = min(-(-max(end, begin + 1) // BLOCK) * BLOCK",
        "end = min(max((end - 1) // BLOCK, begin // BLOCK + 1) * BLOCK",
    ),
    Bug(
        "block of the window's start left out",
        "max(min(low for low, _ in first), 0) // BLOCK",
        "max(min(low for low, _ in first) + BLOCK - 1, 0) // BLOCK",
    ),
    Bug(
        "blocks counted from the padding",
        "yield Place(*of_queries, (b, slice(low, high)), gone + high - low, gone=gone)",
        "yield Place(*of_queries, (b, slice(0, high)), gone + high, gone=gone)",
    ),
    Bug("blocks counted from the first key that is left", "max(-first[b], 0) % BLOCK", "0"),
    Bug("keys that are gone are seen", "(key < gone) | (key < query", "(key < query"),
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
    Bug(
        "keys that the first rows do not see are seen by all",
        "start = min(max(min(high for _, high in first), begin), end)",
        "start = min(max(min(high for _, high in last), begin), end)",
    ),
    Bug(
        "sequences of a batch have the length of the first",
        "else torch.tensor(of_all,",
        "else torch.tensor(of_all[:1] * len(places),",
    ),
    Bug(
        "a mask is remembered without its window",
        "(self._given.left, self._given.right), device)",
        "(-1, self._given.right), device)",
    ),
)
_SCORES = (
    Bug("scale applied twice", "keys.mT).mul_(given.scale)", "keys.mT).mul_(given.scale**2)"),
    Bug("cap without its derivative", "if slope is not None:", "if slope is None and given.softcap:"),
    Bug("cap of the raw score", "score.div_(given.softcap).tanh_()", "score.div_(given.scale * given.softcap).tanh_()"),
    Bug("sink takes part twice", "total + (sinks[place] - top).exp()", "total + 2 * (sinks[place] - top).exp()"),
    Bug(
        "sinks of another head",
        "row = torch.arange(self.rows, device=x.device) % self.group",
        "row = (torch.arange(self.rows, device=x.device) + 1) % self.group",
    ),
    Bug(
        "sink does not move the maximum",
        "top = torch.maximum(top, sinks[place])",
        "top = torch.maximum(top, -sinks[place])",
    ),
)
_GRADIENTS = (
    Bug("delta left out", ".sub_(mean).mul_(weights)", ".mul_(weights)"),
    Bug("scale left out of dq", "seen.of(keys)).mul_(given.scale))", "seen.of(keys)))"),
    Bug(
        "scale in dv",
        "return torch.cat(dq, 1), dk.mul_(given.scale), dv",
        "return torch.cat(dq, 1), dk.mul_(given.scale), dv.mul_(given.scale)",
    ),
    Bug(
        "dk of the last block of rows left out",
        "batched.multiply(one_dscore.mT, one_query, seen.of(dk))",
        "batched.multiply(one_dscore.mT, one_query * (place == 0), seen.of(dk))",
    ),
    Bug(
        "rows counted from the padding",
        "own = place.without_padding(given.right) if backward else place",
        "own = place",
    ),
    Bug("gradient of sinks of the wrong sign", "return -terms", "return terms"),
    Bug(
        "gradient of sinks of queries not in use", "torch.where(lse == -torch.inf, 0.0, share * delta)", "share * delta"
    ),
)

MUTANTS = (Mutants("native", MODULES, (*_STATE, *_MASKS, *_SCORES, *_GRADIENTS)), *mutants_triton.MUTANTS)
