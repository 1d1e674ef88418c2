"""The backends of experts, one module or folder each; they never import each other."""
