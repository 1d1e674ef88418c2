"""The command ``rl-kernels`` and its sub-commands ``list``, ``explain`` and ``doctor``."""
