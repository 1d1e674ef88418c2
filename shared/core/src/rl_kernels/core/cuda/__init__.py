"""CUDA C++ as a citizen of pure-Python wheels: compiled by NVRTC at first use, cached, loaded, launched.

Nothing here imports ``cuda.bindings`` before something is compiled or launched, so that anyone may import it. Where
torch sees no GPU no function of the driver is called: without a driver such a call may never return.
"""
