"""The backends of linear_logp, one module or folder each; they never import each other."""
