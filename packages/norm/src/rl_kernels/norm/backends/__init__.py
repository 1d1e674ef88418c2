"""The backends of rms_norm, one module or folder each; they never import each other."""
