"""CUDA C++ in pure-Python wheels: compiled by NVRTC at first use, cached, loaded, launched.

``cuda.bindings`` is imported only when something is compiled or launched, so this package imports without it. Where
torch sees no GPU, no function of the driver is called: without a driver such a call may never return.
"""
