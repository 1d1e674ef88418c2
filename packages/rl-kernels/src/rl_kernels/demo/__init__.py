"""The demo: GRPO on the CPU through the operators, ending in a bitwise comparison of rollout and training."""
