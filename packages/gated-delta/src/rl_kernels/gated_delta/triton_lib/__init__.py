"""Kernels in Triton that backends share, and their launches."""
