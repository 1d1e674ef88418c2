"""Benchmarks: check a result against the tolerance contract, then time it and its peers in the same run."""
