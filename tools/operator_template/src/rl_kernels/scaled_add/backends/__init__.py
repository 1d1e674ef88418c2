"""The implementations of scaled_add, one a module or folder; they never import each other."""
