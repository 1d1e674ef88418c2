"""The loss by chunks, on top of the operator: ``linear_logp_loss``."""
