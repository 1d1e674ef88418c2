"""The implementations of rms_norm, one a module or folder; they never import each other."""
