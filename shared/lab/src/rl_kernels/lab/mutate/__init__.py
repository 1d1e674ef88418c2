"""Bugs made by a machine, which knows no test: one edit of a module's syntax tree, drawn by a seed."""
