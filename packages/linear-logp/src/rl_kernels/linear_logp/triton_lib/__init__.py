"""Triton kernels that the GPU backends share: they draw tokens from logits."""
