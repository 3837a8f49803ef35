"""Kernels for CPUs that multiply bfloat16, in C++, and the `Ops` that calls them."""
