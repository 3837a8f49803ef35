"""Kernels in the Triton language, each with its torch reference in `torch_ops`."""
