from minisgl_backend.serving.embedding_model import TritonPythonModel  # noqa: F401
