"""Pages of the KV cache: which are free, which hold a known prefix, and which sequences use them."""
