"""What lies between a model's products and is many small launches in PyTorch: in one, with the bits of the many."""
