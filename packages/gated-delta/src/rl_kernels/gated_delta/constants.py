"""Sizes that fix bits: rows of a chunk, rows of a step of a sum, and the number added under the root of a norm."""

CHUNK = 64
"""Tokens of a chunk; chunks begin at multiples of it, counted from the first token of a sequence."""
BLOCK = 16
"""Terms that a tensor core adds at once."""
EPS = 1e-6
"""Added to the sum of squares of a query or key before it is normalized."""
