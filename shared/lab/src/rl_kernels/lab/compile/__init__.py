"""``rl-kernels compile``: compile kernels before they are needed, for GPUs that may be missing."""
