"""The Triton backend of det_gemm: what launches the product, which is core's."""
