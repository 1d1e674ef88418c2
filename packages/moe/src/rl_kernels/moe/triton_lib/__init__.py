"""What the backends for GPUs share: the kernels in Triton, their host code, and the launches of a layer."""
