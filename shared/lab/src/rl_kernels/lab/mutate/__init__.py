"""Mutation testing: edits of a module's syntax tree, drawn at random by a seed."""
