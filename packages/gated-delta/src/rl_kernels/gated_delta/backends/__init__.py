"""The backends of the package's operators, one module or folder each; they never import each other."""
