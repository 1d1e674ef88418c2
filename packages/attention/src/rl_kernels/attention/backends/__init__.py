"""The implementations of det_attention, one a module or folder; they never import each other."""
