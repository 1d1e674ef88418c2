"""Sizes into which sums are cut. They are part of the contract: another value would give other bits."""

STEP = 16
"""Terms added by one step of a chain, and the multiple to which inner sizes are padded with zeros."""
BIAS_STEP = 128
"""Rows at whose multiples the chain over tokens of a bias's gradient may be continued: a multiple of the height of
every tile, because the sum of a tile is one term of the chain."""
FAN = 64
"""Terms that the library adds at once in a row's sum."""
SEGMENT = 4096
"""Longest segment of a row that one tree sums."""
UNIT = 1024
"""Columns of a unit of the vocabulary: each has one softmax state; the states of a row are then merged."""
KEY_SEGMENT = 1024
"""Keys of a segment in attention; a segment that no query sees changes no bit."""
TOKEN_SEGMENT = 4096
"""Tokens of a segment of a sequence that ``grpo_loss`` sums at once on a GPU."""
