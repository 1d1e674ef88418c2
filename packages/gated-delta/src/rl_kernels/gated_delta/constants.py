"""Numbers that fix bits: rows of a chunk, and what is added under the root of a norm; the most tokens of a cache."""

CHUNK = 64
"""Tokens of a chunk; chunks begin at multiples of it, counted from the first token of a sequence."""
MOST_TOKENS = 2**23
"""Lengths of a cache stay below it: a kernel may use the bits above it while it runs."""
EPS = 1e-6
"""Added to the sum of squares of a query or key before it is normalized."""
