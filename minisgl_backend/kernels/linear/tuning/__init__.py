"""Choices that are measured at start, and the file that remembers them."""
