"""Fused kernels between a model's matrix products: one launch replaces several of PyTorch's, with identical bits."""
