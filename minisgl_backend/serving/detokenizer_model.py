"""The Triton model `detokenizer`: chunks of the engine in, the client's outputs out.

Knows nothing of how tokens are computed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import triton_python_backend_utils as pb_utils

from minisgl_backend.engine.channel import HandledSender, socket_directory
from minisgl_backend.errors import ConfigError
from minisgl_backend.serving.answers import AnswerEncoder, StreamError
from minisgl_backend.serving.engine_settings import read_engine_config
from minisgl_backend.serving.wire import Codec
from minisgl_backend.text.vocabulary import load_vocabulary

CANCELLED = -1  # in place of a chunk number: the stream's client has left


class TritonPythonModel:
    """Runs in one instance: a second one would reorder streams."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the vocabulary of the engine's model."""
        repository = Path(args["model_repository"]).resolve().parent
        try:
            config = read_engine_config(repository)
            vocabulary = load_vocabulary(config.model, trust_remote_code=config.trust_remote_code)
            self._handled = HandledSender(socket_directory(repository))
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._answers = AnswerEncoder(vocabulary)
        self._codec = Codec()
        # Of one execute call: stream and chunk number of what was handled, or CANCELLED.
        self._uids: list[int] = []
        self._numbers: list[int] = []

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response a request; then tells the engine fronts what was handled and which clients have left."""
        self._uids.clear()
        self._numbers.clear()
        responses = [self._answer(request) for request in requests]
        self._handled.send(self._uids, self._numbers)
        return responses

    def finalize(self) -> None:
        self._handled.close()

    def _answer(self, request: Any) -> Any:
        tensor = pb_utils.get_input_tensor_by_name(request, "chunk")
        try:
            chunk = self._codec.chunk(tensor.as_numpy())
            self._uids.append(chunk.uid)
            self._numbers.append(chunk.number)
            now = time.monotonic()
            if self._answers.take_check(chunk.uid, now):
                # An ensemble tells only its new steps of a cancellation, never the engine's running one.
                if request.is_cancelled():
                    self._uids.append(chunk.uid)
                    self._numbers.append(CANCELLED)
                self._answers.note_check(now, time.monotonic())
            arrays = self._answers.encode(chunk)
        except StreamError as error:
            return _error(error.status, str(error))
        except msgspec.MsgspecError as error:
            return _error("INVALID_ARG", f"chunk is not valid: {error}")
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])


def _error(status: str, message: str) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, status)))
