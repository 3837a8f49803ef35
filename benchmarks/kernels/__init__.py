"""Kernels alone on one GPU."""
