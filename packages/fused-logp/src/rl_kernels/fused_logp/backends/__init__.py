"""The backends of fused_logp, one module or folder each; they never import each other."""
