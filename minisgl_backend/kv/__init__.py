"""The tensors in which layers keep what attention reads of earlier tokens. Whose pages they are, `cache` knows."""
