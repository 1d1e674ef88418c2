"""A candidate in a process of its own: what it does to torch, to this program or to itself stays there."""
