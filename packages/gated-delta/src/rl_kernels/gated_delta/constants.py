"""Sizes that fix bits, such as the rows of a chunk and of a step of a sum, and the most tokens of a cache."""

CHUNK = 64
"""Tokens of a chunk; chunks begin at multiples of it, counted from the first token of a sequence."""
MOST_TOKENS = 2**23
"""Lengths of a cache stay below it: a kernel may use the bits above it while it runs."""
BLOCK = 16
"""Terms that a tensor core adds at once."""
EPS = 1e-6
"""Added to the sum of squares of a query or key before it is normalized."""
