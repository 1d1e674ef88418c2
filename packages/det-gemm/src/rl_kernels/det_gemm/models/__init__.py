"""Whole models: ``invariant`` makes one whose rows do not follow the batch, ``audit`` finds the module that does."""
