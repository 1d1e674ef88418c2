"""Fused parts between a model's products: one launch for many of PyTorch's, with identical bits."""
