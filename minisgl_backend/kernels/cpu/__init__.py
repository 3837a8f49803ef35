"""Kernels for CPUs that multiply bfloat16, in C++, and the `Ops` and GEMMs that call them."""
