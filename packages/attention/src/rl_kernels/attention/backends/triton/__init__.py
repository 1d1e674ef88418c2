"""det_attention in Triton: prefill, decode with the keys split over programs, and the backward pass."""
