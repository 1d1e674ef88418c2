"""Shared by the Triton backends: where they run, launches, and device functions."""
