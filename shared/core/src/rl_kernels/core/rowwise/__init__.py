"""Batch-invariant arithmetic on rows in PyTorch: sums, softmax statistics, gradients. Products are in ``products``."""
