"""The native backend of grpo_loss: PyTorch on any device."""
