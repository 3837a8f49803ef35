"""The Triton models: requests in, responses out. Only this package may import triton_python_backend_utils."""
