"""A candidate in its own process: what it does to torch, to this program or to itself does not affect the checker."""
