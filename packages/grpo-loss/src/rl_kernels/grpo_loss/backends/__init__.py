"""The backends of grpo_loss, one module or folder each; they never import each other."""
