"""What checks, tests and benchmarks know of grpo_loss; nothing at run time imports it."""
