"""The Triton door: the only room that may import triton_python_backend_utils."""
