"""LoRA: what adapters add to the output of a linear layer, each token's by its own."""
