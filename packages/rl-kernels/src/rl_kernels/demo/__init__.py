"""The demo: GRPO on the operators, and a bitwise comparison of the log-probs of rollout and training."""
