"""The implementations of det_gemm, one a module or folder; they never import each other."""
