"""Compare the log-probs of rollout and training, token by token: of a stock model, and under ``invariant``."""
