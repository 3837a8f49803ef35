"""The Triton models: requests in, responses out. Only this room may import triton_python_backend_utils."""
