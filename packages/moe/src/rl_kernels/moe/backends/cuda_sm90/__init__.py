"""The CUDA C++ backend of experts for Hopper: sources, and the host code that launches them."""
