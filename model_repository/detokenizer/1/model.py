from minisgl_backend.serving.detokenizer_model import TritonPythonModel  # noqa: F401
