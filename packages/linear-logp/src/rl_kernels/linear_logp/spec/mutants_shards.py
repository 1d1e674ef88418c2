"""Bugs in how the vocabulary is shared, planted in copies of the modules that all backends share and of the native one.

One process never gets a wrong result from them, or only other bits, so a virtual group must show each
(``tests/test_shards.py``).
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug

MODULES = tuple(
    f"rl_kernels.linear_logp.{name}"
    for name in ("vocabulary", "inputs", "packing", "tree", "sums", "backward", "backends.native", "spec.virtual")
)

SHARDS = (
    Bug(
        "units of ranks in the opposite order",
        "states = gathered[:, :-1].unflatten",
        "states = gathered.flip(0)[:, :-1].unflatten",
    ),
    Bug("units of all ranks interleaved", ".flatten(0, 1)[: units", ".transpose(0, 1).flatten(0, 1)[: units"),
    Bug("logit of the next rank", "(slots * UNIT)).clamp(0, ranks - 1)", "(slots * UNIT) + 1).clamp(0, ranks - 1)"),
    Bug(
        "owner of an id by even shards",
        "target_ids.long() // (slots * UNIT)",
        "target_ids.long() * ranks // vocab_size",
    ),
    Bug("logits of all ranks added", ".gather(0, owner[None])[0]", ".amax(0)"),
    Bug("last unit left out", "[: units(vocab_size)]", "[: max(vocab_size // UNIT, 1)]"),
    Bug(
        "third number taken for the second",
        "numbers = STATE if entropy else STATE - 1\n    slots",
        "numbers = STATE\n    slots",
    ),
    Bug(
        "ids counted from the shard",
        "block.target_ids, block.start + columns.start)",
        "block.target_ids, columns.start)",
    ),
    Bug(
        "ids beyond the shard are bad",
        "return self.weight.shape[0] if self.whole is None else self.whole",
        "return self.weight.shape[0]",
    ),
    Bug("segments added in a chain", "self._waiting[-1][0] == level:", "level < 9:"),
    Bug("level of a sum not counted", "left, level + 1", "left, level"),
    Bug("buffer freed twice", "self._free.append(term)", "self._free += [term, left]"),
    Bug("missing siblings left out", "            left += total\n", ""),
    Bug(
        "segments of an eighth of the columns",
        "units(-(-vocab_size // SEGMENTS))",
        "(units(vocab_size) // SEGMENTS + 1)",
    ),
    Bug(
        "boundary one unit late", "(min(rank * width, vocab_size)", "(min(rank * width + UNIT * (rank > 0), vocab_size)"
    ),
    Bug("boundary one column late", "(min(rank * width, vocab_size)", "(min(rank * width + (rank > 0), vocab_size)"),
    Bug("chain not started anew", "continues=part.start > 0", "continues=columns.start > 0"),
    Bug(
        "segments counted from the first column",
        "slice(first - inputs.start, last - inputs.start)",
        "slice(first, last)",
    ),
    Bug("only the first segment of a shard", "for segment in segments:", "for segment in segments[:1]:"),
    Bug(
        "sum of a shard rounded",
        "return dhidden if partial else dhidden.to(",
        "return dhidden.to(hidden.dtype).to(dhidden.dtype) if partial else dhidden.to(",
    ),
)
