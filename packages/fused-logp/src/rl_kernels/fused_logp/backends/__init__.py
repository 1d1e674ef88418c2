"""The implementations of fused_logp, one a module or folder; they never import each other."""
