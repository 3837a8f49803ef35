"""The Triton model `engine`: decoupled, a thin front of the engine cores.

Each response has a chunk, which the detokenizer turns into text, together with all outputs other than text.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from minisgl_backend.delivery.admin_commands import CommandResult, encode
from minisgl_backend.delivery.arrays import Arrays
from minisgl_backend.delivery.frontend import EngineFront
from minisgl_backend.environment import Environment, admin_key
from minisgl_backend.errors import MinisglError
from minisgl_backend.host.options.engine import model_name, read_engine_config
from minisgl_backend.host.server_watch import start_watch
from minisgl_backend.ipc.channel import socket_directory
from minisgl_backend.ipc.wire import Chunk, Codec
from minisgl_backend.process.spawn import log_to_stderr
from minisgl_backend.serving.metrics import MetricsReporter
from minisgl_backend.serving.responses import error_response
from minisgl_backend.text.vocabulary import load_vocabulary

DRAIN_S = 20.0  # tritonserver's own exit timeout is 30 s
FIRST_WHOLE = 32768  # number of the first front that is not decoupled
WHOLE_ONLY = "the model `infer` sends one response a request; allowed: stream false or unset (`ensemble` has streams)"
SWITCH_S = 0.0005  # the interpreter's switch interval: longest delay of a sender thread by another

_LOGGER = logging.getLogger(__name__)


class TritonPythonModel:
    """Any number of instances; each owns the response senders of its requests.

    If the model is not decoupled (`engine_infer`), a request has one response; requests for more are refused.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Starts the engine cores, or attaches to them, and waits until all are ready."""
        sys.setswitchinterval(SWITCH_S)
        repository = Path(args["model_repository"]).resolve().parent
        instance = args["model_instance_name"].rsplit("_", 1)[-1]
        front = int(instance) if instance.isdigit() else 0
        self._decoupled = json.loads(args["model_config"]).get("model_transaction_policy", {}).get("decoupled", False)
        if not self._decoupled:
            front += FIRST_WHOLE
        self._watch = start_watch() if front == 0 else None
        try:
            log_to_stderr("front", Environment.read().log_level)
            config = read_engine_config(repository)
            vocabulary = load_vocabulary(config.model, trust_remote_code=config.trust_remote_code)
            self._codec = Codec()
            self._front = EngineFront(
                config,
                vocabulary,
                front=front,
                socket_dir=socket_directory(repository),
                probe=self._probe,
                admin_key=admin_key(),
                name=model_name(config, repository),
            )
            self._front.start()
        except MinisglError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        _LOGGER.debug("front %d is attached to the engine cores %s", front, self._front.client.core_pids)
        self._metrics = MetricsReporter(self._front, is_leader=front == 0, model=model_name(config, repository))
        self._metrics.start()

    def execute(self, requests: list[Any]) -> None:
        """Passes the requests to the engine; the responder's threads send their responses."""
        for request in requests:
            sender = _TritonSender(request.get_response_sender(), self._codec)
            try:
                ids = pb_utils.get_input_tensor_by_name(request, "input_ids")
                packed = pb_utils.get_input_tensor_by_name(request, "spec")
                if ids is None or packed is None:
                    message = "input_ids and spec are made by the model `tokenizer`; send requests to `ensemble`"
                    sender.fail("INVALID_ARG", message)
                    continue
                spec = self._codec.spec(packed.as_numpy())
                if spec.stop:
                    self._front.stop_requests(spec.request_id)
                    if spec.answer:
                        sender.fail("CANCELLED", spec.answer)
                    else:
                        sender.end()
                    continue
                if spec.command:
                    self._front.commands.submit(spec.command, spec.key, sender.tell)
                    continue
                if not self._decoupled and (spec.options.stream or spec.options.apart):
                    sender.fail("INVALID_ARG", WHOLE_ONLY)
                    continue
                self._front.submit(sender, ids.as_numpy().reshape(-1), spec, confirmed=True)
            except msgspec.MsgspecError as error:
                sender.fail("INVALID_ARG", f"spec is not valid: {error}")

    def finalize(self) -> None:
        """Waits for running requests, then ends the cores that this front started."""
        self._metrics.stop()
        self._front.close(DRAIN_S)

    def _probe(self, chunk: Chunk) -> None:
        tensor = pb_utils.Tensor("chunk", self._codec.pack(chunk).reshape(1, -1))
        pb_utils.InferenceRequest(
            model_name="detokenizer", requested_output_names=["text_output"], inputs=[tensor]
        ).exec()


class _TritonSender:
    """The responses of one request, sent by one thread; any thread may call `is_cancelled`.

    tritonserver 2.51 crashes (SIGSEGV in TRITONBACKEND_ResponseFactoryIsCancelled) when asked about a request that has
    had its last response, so the two calls never overlap.
    """

    __slots__ = ("_codec", "_ended", "_lock", "_sender")

    def __init__(self, response_sender: Any, codec: Codec) -> None:
        self._sender = response_sender
        self._codec = codec
        self._lock = threading.Lock()
        self._ended = False

    def send(self, chunk: Chunk, details: Arrays, final: bool) -> None:
        tensors = [pb_utils.Tensor("chunk", self._codec.pack(chunk).reshape(1, -1))]
        tensors += [pb_utils.Tensor(name, array) for name, array in details.items()]
        (self.end if final else self._sender.send)(pb_utils.InferenceResponse(tensors))

    def fail(self, status: str, message: str) -> None:
        self.end(error_response(status, message))

    def tell(self, result: CommandResult) -> None:
        """Ends a command: its result is the chunk."""
        chunk = np.frombuffer(encode(result), dtype=np.uint8).reshape(1, -1)
        self.end(pb_utils.InferenceResponse([pb_utils.Tensor("chunk", chunk)]))

    def end(self, response: Any = None) -> None:
        """Ends the request, with its last response or without any."""
        with self._lock:
            self._ended = True
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())
