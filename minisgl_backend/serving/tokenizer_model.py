"""The Triton model `tokenizer`: a client's request in, validated and tokenized; the engine's request out.

Direct clients of this model can also get the prompt as text, its tokens as texts, and information about the model.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from minisgl_backend.adapters.task_modules import most_task_bytes
from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, InvalidRequestError, MinisglError, status_of
from minisgl_backend.host.options.engine import demo_name, model_name, read_engine_config
from minisgl_backend.images.front import open_front
from minisgl_backend.ipc.adapter_table import ServedAdapters, task_root
from minisgl_backend.ipc.channel import socket_directory
from minisgl_backend.ipc.wire import Codec
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.parsers.thinking import TAIL
from minisgl_backend.process.absent import absent_torch
from minisgl_backend.process.spawn import log_to_stderr
from minisgl_backend.serving.adapter_fields import AdapterFields, AdapterTasks
from minisgl_backend.serving.codec import RequestCodec
from minisgl_backend.serving.fields import shown
from minisgl_backend.serving.image_codec import may_hold_images
from minisgl_backend.serving.pooling_codec import PoolingCodec
from minisgl_backend.serving.prompt_settings import CodecSettings
from minisgl_backend.serving.responses import error_response
from minisgl_backend.serving.tensors import IMAGES

if TYPE_CHECKING:
    from minisgl_backend.images.front import ImageFront
    from minisgl_backend.text.prompt_borders import PromptBorders
    from minisgl_backend.text.tokenizer import Tokenizer

IMAGE_REQUESTS = 16  # requests whose images are read at a time, beside those that wait for URLs

_LOGGER = logging.getLogger(__name__)


class TritonPythonModel:
    """Stateless: any number of instances."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the tokenizer of the engine's model."""
        repository = Path(args["model_repository"]).resolve().parent
        parameters = {
            key: value["string_value"] for key, value in json.loads(args["model_config"])["parameters"].items()
        }
        try:
            log_to_stderr("tokenizer", Environment.read().log_level)
            config = read_engine_config(repository)
            model = load_model_config(config.model, config.model_impl, trust_remote_code=config.trust_remote_code)
            model = model.reading(images=config.encoder_cache_bytes > 0)
            tokenizer = _load_tokenizer(config)
            sees, why_not = model.encoder is not None, model.why_no_images
            images, why_not = open_front(config.model, tokenizer, config, sees=sees, why_not=why_not)
            settings = CodecSettings.of_model(
                model,
                config.max_seq_len_override,
                apply_chat_template=_flag(parameters, "apply_chat_template", demo_name(config, repository) is not None),
                why_no_images=why_not,
                exclude_input_in_output=_flag(parameters, "exclude_input_in_output", True),
            )
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        pooling = PoolingCodec(tokenizer, model, settings.max_seq_len, enabled=config.enable_embeddings)
        borders = _borders(tokenizer) if model.has_states else None
        directory = socket_directory(repository)
        self._adapters = ServedAdapters(config, directory)
        most = config.max_adapter_tasks
        most_bytes = most_task_bytes(model, config.adapter_rank)
        tasks = AdapterTasks(task_root(directory), most, most_bytes) if most else None
        self.start(
            RequestCodec(tokenizer, settings, pooling, images, borders, AdapterFields(self._adapters, tasks)),
            tokenizer,
            images,
        )
        self._info = {
            "model": model_name(config, repository),
            "max_model_len": settings.max_seq_len,
            "vocab_size": settings.vocab_size,
            "chat_template": tokenizer.chat_template,
            "added_tokens": tokenizer.added_tokens,
            "tokenizer": tokenizer.info(),
            "max_images": 0 if images is None else config.max_images,
        }

    def start(self, codec: RequestCodec, tokenizer: Tokenizer, images: ImageFront | None) -> None:
        """The part of `initialize` that requests need."""
        self._codec, self._tokenizer, self._images, self._wire = codec, tokenizer, images, Codec()
        # Requests with images wait for their decoding there; those without never do. As many threads as may wait for
        # URLs are more than those that decode, so that no slow host holds up a request that has its images in it.
        self._threads = None
        if images is not None:
            self._threads = ThreadPoolExecutor(IMAGE_REQUESTS + images.max_fetching, thread_name_prefix="images")

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """One response per request, or one error that names the field; of requests with images, a thread sends it."""
        if self._threads is None or not any(map(_has_images, requests)):
            return [self._answer(request, self._wire) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            if _has_images(request):
                self._threads.submit(self._answer_later, sender, request)
            else:
                _send(sender, self._answer(request, self._wire))
        return None

    def _answer_later(self, sender: Any, request: Any) -> None:
        _send(sender, self._answer(request, Codec()))

    def finalize(self) -> None:
        """Waits for requests with images, and ends their processes."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        if self._images is not None:
            self._images.close()

    def _answer(self, request: Any, wire: Codec) -> Any:
        requested = set(request.requested_output_names())
        try:
            if requested == {"model_info"}:
                return pb_utils.InferenceResponse([_text_tensor("model_info", self._model_info())])
            parameters = json.loads(request.parameters() or "{}")
            token_ids, spec = self._codec.decode(
                {tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
                parameters,
                # HTTP's generate passes Triton's own field on as a parameter.
                deadline=_deadline(request.timeout() or parameters.get("timeout", 0)),
                request_id=request.request_id(),
                only_counts=bool(requested) and "spec" not in requested,
            )
        except MinisglError as error:
            return error_response(status_of(error), str(error))
        except Exception as error:
            # An unforeseen error ends only the request that caused it.
            _LOGGER.exception("request %r could not be read", request.request_id())
            return error_response("INVALID_ARG", f"the request could not be read ({type(error).__name__})")
        tensors = [
            pb_utils.Tensor("input_ids", token_ids.reshape(1, -1)),
            pb_utils.Tensor("spec", wire.pack(spec).reshape(1, -1).astype(np.uint8, copy=False)),
        ]
        return pb_utils.InferenceResponse(tensors + self._prompt_outputs(requested, token_ids.tolist()))

    def _model_info(self) -> str:
        adapters = {"adapters": self._adapters.folders(), "adapter_states": self._adapters.states()}
        return json.dumps({**self._info, **adapters})

    def _prompt_outputs(self, requested: set[str], token_ids: list[int]) -> list[Any]:
        decode = self._tokenizer.decode
        texts: dict[str, Callable[[], Sequence[str]]] = {
            "prompt_text": lambda: [decode(token_ids)],
            "prompt_tail": lambda: [decode(token_ids[-TAIL:])],
            "token_texts": lambda: [decode([token]) for token in token_ids],
            "model_info": lambda: [self._model_info()],
        }
        return [_text_tensor(name, *make()) for name, make in texts.items() if name in requested]


def _has_images(request: Any) -> bool:
    """Whether its answer may have to wait for images. May be wrong about a text that looks like one."""
    for tensor in request.inputs():
        name = tensor.name()
        if name == "image_data" or name in IMAGES:
            return True
        if name == "messages" and any(may_hold_images(str(text)) for text in tensor.as_numpy().reshape(-1).tolist()):
            return True
    return False


def _send(sender: Any, response: Any) -> None:
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _borders(tokenizer: Tokenizer) -> PromptBorders:
    from minisgl_backend.text.prompt_borders import PromptBorders

    return PromptBorders(tokenizer)


def _load_tokenizer(config: EngineConfig) -> Tokenizer:
    """Imports transformers without torch, unless torch is loaded already (for one of transformers' own models) or the
    folder's Python code may need it. Not at the top of the module, which auto-completing servers import twice."""
    with contextlib.nullcontext() if config.trust_remote_code else absent_torch():
        from minisgl_backend.text.tokenizer import Tokenizer
    return Tokenizer(config.model, trust_remote_code=config.trust_remote_code)


def _text_tensor(name: str, *texts: str) -> Any:
    return pb_utils.Tensor(name, np.array([[text.encode() for text in texts]], dtype=object))


def _flag(parameters: dict[str, str], name: str, automatic: bool) -> bool:
    text = parameters.get(name, "auto").strip().lower()
    if text not in ("auto", "true", "false"):
        raise ConfigError(f"{name} is {text!r} in tokenizer/config.pbtxt; allowed: auto, true or false")
    return automatic if text == "auto" else text == "true"


def _deadline(timeout_us: object) -> float | None:
    """time.monotonic() seconds; all processes of a machine share this clock."""
    # Over gRPC a negative number arrives as 2^63 or more.
    if not isinstance(timeout_us, int) or isinstance(timeout_us, bool) or not 0 <= timeout_us < 1 << 63:
        allowed = "a whole number of microseconds, 0: no limit"
        raise InvalidRequestError(f"timeout is {shown(timeout_us)}; allowed: {allowed}")
    return time.monotonic() + timeout_us / 1e6 if timeout_us else None
