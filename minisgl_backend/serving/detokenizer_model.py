"""The Triton model `detokenizer`: the engine's chunks in, text out (or the token ids, if the client requested them)."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import triton_python_backend_utils as pb_utils

from minisgl_backend.delivery.client_checks import ClientChecks
from minisgl_backend.delivery.text_output import StreamError, TextOutputEncoder
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.engine import read_engine_config
from minisgl_backend.ipc.acks import AckSender
from minisgl_backend.ipc.channel import socket_directory
from minisgl_backend.ipc.wire import Chunk, Codec
from minisgl_backend.serving.responses import error_response
from minisgl_backend.text.vocabulary import load_vocabulary

_LOGGER = logging.getLogger(__name__)

FLUSH_AT = 256  # chunks; a front never leaves that many unacknowledged, but a direct client of this model may


class TritonPythonModel:
    """Runs in one instance: a second one would reorder streams."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the vocabulary of the engine's model."""
        repository = Path(args["model_repository"]).resolve().parent
        try:
            config = read_engine_config(repository)
            vocabulary = load_vocabulary(config.model, trust_remote_code=config.trust_remote_code)
            handled = AckSender(socket_directory(repository))
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self.start(TextOutputEncoder(vocabulary), ClientChecks(), handled)

    def start(self, answers: TextOutputEncoder, checks: ClientChecks, handled: AckSender) -> None:
        """Stores the objects that the other methods use."""
        self._answers = answers
        self._checks = checks
        self._handled = handled
        self._codec = Codec()
        self._must_flush = False

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request; then sends the fronts any acknowledgements and news of clients that are due."""
        responses = [self._answer(request) for request in requests]
        if self._must_flush:
            self._must_flush = not self._handled.flush()
        return responses

    def finalize(self) -> None:
        self._handled.close()

    def _answer(self, request: Any) -> Any:
        tensor = pb_utils.get_input_tensor_by_name(request, "chunk")
        try:
            chunk = self._codec.chunk(tensor.as_numpy())
            self._handled.note(chunk.uid, chunk.number)
            self._must_flush |= chunk.confirm or len(self._handled) >= FLUSH_AT
            self._look_for_client(request, chunk)
            arrays = self._answers.encode(chunk)
        except StreamError as error:
            return error_response(error.status, str(error))
        except msgspec.MsgspecError as error:
            return error_response("INVALID_ARG", f"chunk is not valid: {error}")
        except Exception as error:  # otherwise all requests of this call would fail
            _LOGGER.exception("a chunk could not be made into text")
            return error_response("INTERNAL", f"the text could not be made ({type(error).__name__})")
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])

    def _look_for_client(self, request: Any, chunk: Chunk) -> None:
        """Asks the server here, since an ensemble reports a cancellation only to later steps, not to the running
        engine."""
        now = time.monotonic()
        # The first chunk of a stream is not asked (the next one is), and the last one need not be.
        goes_on = chunk.number > 1 and chunk.parts and not chunk.parts[-1].is_last
        if not goes_on or not self._checks.is_due(chunk.uid, now):
            return
        gone = request.is_cancelled()
        ended = time.monotonic()
        self._checks.note(chunk.uid, now, ended, gone=gone)
        if gone:
            self._handled.note_gone(chunk.uid, ended)
            self._must_flush = True
