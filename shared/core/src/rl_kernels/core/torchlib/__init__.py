"""Integration of operators with PyTorch: their ops, first-order gradients, numbers as tensors, autocast."""
