"""The backends of gated_delta_rule, one module or folder each; they never import each other."""
