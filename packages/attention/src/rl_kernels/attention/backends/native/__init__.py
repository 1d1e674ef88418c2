"""det_attention in PyTorch, for any device."""
