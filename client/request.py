"""A request as Triton tensors: the tensor's name and type for each option.

The server validates the values; only types are checked here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from .errors import InvalidRequest, timed_out

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, and any other fields that the chat template reads
Datatype = Literal["BYTES", "BOOL", "INT32", "UINT64", "FP32"]
Scalar = str | bool | int | float

MAX_TIMEOUT = 1e9  # seconds


class SamplingOptions(TypedDict, total=False):
    """How to continue the prompt. An absent option takes the model's own default."""

    max_tokens: int  # new tokens; absent: up to the context limit
    min_tokens: int
    temperature: float  # 0: greedy
    top_k: int  # 0: off
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    bad_words: str | Sequence[str]
    logit_bias: Mapping[int, float]
    logprobs: int  # 0: the sampled token's; k: and the k most likely ones
    prompt_logprobs: int
    n: int  # sequences from one prompt
    ignore_eos: bool
    cache_salt: str  # cached prefixes are shared only among requests with the same salt
    speculative: bool  # False: disables the server's speculation
    images: Sequence[bytes | str | Path]  # of a prompt that has their places: files' bytes, paths, or data URLs
    skip_special_tokens: bool
    add_special_tokens: bool
    apply_chat_template: bool  # whether to send a plain prompt as a user's chat message
    chat_template_kwargs: Mapping[str, Any]
    exclude_input_in_output: bool  # False: the answer starts with the prompt (not in a stream)
    guided_decoding_guide_type: str  # "json", "json_schema", "regex", "ebnf_grammar" or "structural_tag"
    guided_decoding_guide: str | Mapping[str, Any]  # a mapping is a JSON schema
    return_cumulative_logprob: bool  # comes in `extra`
    return_perf_metrics: bool  # comes in `extra`
    sampling_parameters: Mapping[str, Any]  # vLLM's names, sent as one JSON object


class RequestOptions(SamplingOptions, total=False):
    """Of one request to Triton's ensemble."""

    request_id: str | None  # absent: a random one
    timeout: float | None  # seconds for the whole answer; absent: the client's
    priority: int  # 0 is the default level; otherwise 1 is the most urgent


@dataclass(frozen=True)
class Tensor:
    """One input. Its shape for a model with a batch dimension is [1, len(values)]."""

    datatype: Datatype
    values: tuple[Scalar, ...]
    is_list: bool = False


@dataclass(frozen=True)
class InferenceRequest:
    """All that a transport needs to send."""

    model: str
    model_version: str  # "": the server chooses
    request_id: str
    tensors: Mapping[str, Tensor]
    stream: bool
    timeout: float | None = None  # seconds for the whole answer
    batched: bool = True  # the model has a batch dimension


# option -> (tensor, datatype). An ensemble cannot use one name for both an input and an output.
_SCALARS: dict[str, tuple[str, Datatype]] = {
    "max_tokens": ("max_tokens", "INT32"),
    "min_tokens": ("min_tokens", "INT32"),
    "temperature": ("temperature", "FP32"),
    "top_k": ("top_k", "INT32"),
    "top_p": ("top_p", "FP32"),
    "min_p": ("min_p", "FP32"),
    "seed": ("seed", "UINT64"),
    "repetition_penalty": ("repetition_penalty", "FP32"),
    "presence_penalty": ("presence_penalty", "FP32"),
    "frequency_penalty": ("frequency_penalty", "FP32"),
    "logprobs": ("num_logprobs", "INT32"),
    "prompt_logprobs": ("num_prompt_logprobs", "INT32"),
    "n": ("num_return_sequences", "INT32"),
    "ignore_eos": ("ignore_eos", "BOOL"),
    "cache_salt": ("cache_salt", "BYTES"),
    "speculative": ("speculative", "BOOL"),
    "skip_special_tokens": ("skip_special_tokens", "BOOL"),
    "add_special_tokens": ("add_special_tokens", "BOOL"),
    "apply_chat_template": ("apply_chat_template", "BOOL"),
    "exclude_input_in_output": ("exclude_input_in_output", "BOOL"),
    "guided_decoding_guide_type": ("guided_decoding_guide_type", "BYTES"),
    "guided_decoding_guide": ("guided_decoding_guide", "BYTES"),
    "return_cumulative_logprob": ("return_cumulative_logprob", "BOOL"),
    "return_perf_metrics": ("return_final_perf_metrics", "BOOL"),
}
_LISTS: dict[str, tuple[str, Datatype]] = {
    "stop": ("stop_words", "BYTES"),
    "stop_token_ids": ("stop_token_ids", "INT32"),
    "bad_words": ("bad_words", "BYTES"),
}
_JSON_OBJECTS = ("logit_bias", "chat_template_kwargs", "sampling_parameters")
_INTEGER_RANGES: dict[str, tuple[int, int]] = {"INT32": (-(2**31), 2**31 - 1), "UINT64": (0, 2**64 - 1)}


def build_tensors(
    prompt: str | None, messages: Sequence[Message] | None, stream: bool, priority: int, options: SamplingOptions
) -> dict[str, Tensor]:
    """The inputs of the ensemble. Raises InvalidRequest for a wrong type, TypeError for an unknown option."""
    if (prompt is None) == (messages is None):
        raise InvalidRequest("give exactly one of prompt and messages")
    tensors: dict[str, Tensor] = {}
    if prompt is not None:
        tensors["text_input"] = _scalar("prompt", "BYTES", prompt)
    else:
        if isinstance(messages, (str, Mapping)):
            raise InvalidRequest(f"messages is a {type(messages).__name__}; allowed: a list of chat messages")
        tensors["messages"] = _scalar("messages", "BYTES", _to_json("messages", list(messages or ())))
    tensors["stream"] = Tensor("BOOL", (stream,))
    # The server adds these outputs only on request.
    for output in ("finish_reason", "num_input_tokens", "num_output_tokens"):
        tensors[f"return_{output}"] = Tensor("BOOL", (True,))
    if priority:
        tensors["priority"] = _scalar("priority", "INT32", priority)
    for name, value in options.items():
        if value is not None:
            tensor, encoded = _encode_option(name, value)
            tensors[tensor] = encoded
    return tensors


def check_request_id(request_id: Any) -> None:
    """Raises InvalidRequest for a wrong type; None is valid."""
    if request_id is not None:
        _check("request_id", "BYTES", request_id)


def check_timeout(timeout: Any, request_id: str) -> None:
    """Raises InvalidRequest for an invalid time, or one longer than sockets wait, and TimedOut if none is left."""
    if timeout is None:
        return
    seconds = _check("timeout", "FP32", timeout)
    if not float(seconds) <= MAX_TIMEOUT:
        raise InvalidRequest(f"timeout is {timeout!r}; allowed: at most {MAX_TIMEOUT:g} seconds; None: no limit")
    if float(seconds) <= 0:
        raise timed_out(float(seconds), request_id)


def _encode_option(name: str, value: Any) -> tuple[str, Tensor]:
    if name == "guided_decoding_guide" and isinstance(value, Mapping):
        value = _to_json(name, dict(value))
    if name in _SCALARS:
        tensor, datatype = _SCALARS[name]
        return tensor, _scalar(name, datatype, value)
    if name in _LISTS:
        tensor, datatype = _LISTS[name]
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            allowed = "a string, or a list of strings" if datatype == "BYTES" else "a list of whole numbers"
            raise InvalidRequest(f"{name} is {value!r}; allowed: {allowed}")
        return tensor, Tensor(datatype, tuple(_check(name, datatype, item) for item in items), is_list=True)
    if name == "images":
        items = [value] if isinstance(value, (bytes, str, Path)) else value
        if not isinstance(items, (list, tuple)):
            raise InvalidRequest(f"images is {value!r:.60}; allowed: a list of files' bytes, paths, or data URLs")
        return "image", Tensor("BYTES", tuple(_image(number, one) for number, one in enumerate(items)), is_list=True)
    if name in _JSON_OBJECTS:
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{name} is {value!r}; allowed: a mapping")
        return name, Tensor("BYTES", (_to_json(name, dict(value)),))
    allowed = ", ".join(sorted(SamplingOptions.__annotations__))
    raise TypeError(f"there is no option {name!r}; the options are: {allowed}")


def question_of(text: str, images: Sequence[bytes | str | Path]) -> Message:
    """A user's message: the images, then the text. images: as the option's. Raises InvalidRequest."""
    if not images:
        return {"role": "user", "content": text}
    found = [_image(number, one) for number, one in enumerate(images)]
    urls = [one if one.lstrip()[:5].lower() == "data:" else f"data:;base64,{one}" for one in found]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _image(number: int, given: Any) -> str:
    """As base64, or the data URL that it is."""
    if isinstance(given, str) and given.lstrip()[:5].lower() == "data:":
        return given
    if isinstance(given, (str, Path)):
        try:
            given = Path(given).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"images[{number}] cannot be read: {error}") from None
    if not isinstance(given, bytes):
        raise InvalidRequest(f"images[{number}] is {given!r:.60}; allowed: a file's bytes, a path, or a data URL")
    return base64.b64encode(given).decode()


def _scalar(name: str, datatype: Datatype, value: Any) -> Tensor:
    return Tensor(datatype, (_check(name, datatype, value),))


def _check(name: str, datatype: Datatype, value: Any) -> Scalar:
    """`value` as the type that is sent. A bool is an int in Python but an error here."""
    if datatype == "BYTES":
        if isinstance(value, str):
            return _as_unicode(name, value)
        raise InvalidRequest(f"{name} is {value!r}; allowed: a string")
    if datatype == "BOOL":
        if isinstance(value, bool):
            return value
        raise InvalidRequest(f"{name} is {value!r}; allowed: True or False")
    if datatype == "FP32":
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        raise InvalidRequest(f"{name} is {value!r}; allowed: a number")
    low, high = _INTEGER_RANGES[datatype]
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise InvalidRequest(f"{name} is {value!r}; allowed: a whole number from {low} to {high}")


def _to_json(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from None
    return _as_unicode(name, text)


def _as_unicode(name: str, text: str) -> str:
    """The text, if UTF-8 can encode it: Python decodes invalid bytes to lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} holds a lone surrogate; allowed: Unicode text") from None
    return text
