"""Attention over latents (MLA), and its backends."""
