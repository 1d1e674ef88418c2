"""How operators join PyTorch: their ops, first-order gradients, numbers as tensors, autocast."""
