"""The Triton backend of grpo_loss: kernels and the host code that launches them."""
