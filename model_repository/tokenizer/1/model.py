from minisgl_backend.serving.tokenizer_model import TritonPythonModel  # noqa: F401
