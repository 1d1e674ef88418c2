"""The native backend of gated_delta_rule: PyTorch on any device."""
