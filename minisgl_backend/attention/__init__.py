"""Attention over the paged KV cache: one interface, and a backend per kernel library."""
