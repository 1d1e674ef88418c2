"""The implementations of linear_logp, one a module or folder; they never import each other."""
