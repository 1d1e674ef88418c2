"""The implementations of grpo_loss, one a module or folder; they never import each other."""
