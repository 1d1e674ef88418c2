"""Sizes that fix bits: rows of a chunk and of a block, and the number added under the root of a norm."""

CHUNK = 64
"""Tokens of a chunk; chunks begin at multiples of it, counted from the first token of a sequence."""
BLOCK = 16
"""Rows of a block, whose triangular system is inverted."""
BLOCKS = CHUNK // BLOCK
EPS = 1e-6
"""Added to the sum of squares of a query or key before it is normalized."""
