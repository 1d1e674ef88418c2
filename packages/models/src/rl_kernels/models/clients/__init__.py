"""Integrations of the operators: one module for each trainer or library."""
