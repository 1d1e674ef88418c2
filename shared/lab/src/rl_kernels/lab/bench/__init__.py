"""Benchmarks: hold a result to the tolerance contract, then time it beside its peers in the same run."""
