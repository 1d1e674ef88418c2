"""The Triton backend of det_gemm: it launches core's matrix product."""
