"""Attention over the paged KV cache, in the Triton language: decode and prefill."""
