"""The demo on a GPU: GRPO on a Llama, twice from the same weights, through the operators and in stock PyTorch."""
