"""The backends of det_attention, one module or folder each; they never import each other."""
