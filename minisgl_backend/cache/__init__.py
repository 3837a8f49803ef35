"""Pages of the KV cache: which are free, which hold a known prefix, and who may use them."""
