"""The backends of det_gemm, one module or folder each; they never import each other."""
