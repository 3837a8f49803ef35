"""Attention over the paged KV cache: the pool, one interface, and a backend per kernel library."""
