"""Cases, checks and benchmark of grpo_loss, for the checker and the tests; not imported at run time."""
