"""The backends of scaled_add, one module or folder each; they never import each other."""
