"""Kernels for CPUs in C++, and the `Ops` and GEMMs that call them."""
