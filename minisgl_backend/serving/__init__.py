"""The Triton door: Triton requests in, Triton responses out.

Knows nothing of pages, steps or models. Only this room may import triton_python_backend_utils.
"""
