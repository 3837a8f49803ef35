"""Raw values of a request -> typed ones, by field name: tensors, request parameters and sampling_parameters alike.

Every error names the field, the value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.request import MAX_BAD_WORDS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from minisgl_backend.serving.tensors import (
    ENDPOINT_INPUTS,
    IMAGE_INPUTS,
    INPUTS,
    LLMAPI_INPUTS,
    RENAMED_INPUTS,
    TENSORRT_LLM_INPUTS,
    TENSORS,
)

MAX_LIST = 4096
_LONGEST = {"stop_words": MAX_STOP_STRINGS, "bad_words": MAX_BAD_WORDS, "stop_token_ids": MAX_STOP_TOKEN_IDS}
MAX_SHOWN = 60  # characters of a wrong value that an error message quotes

# Aliases of fields, from an older or a foreign API; the canonical name wins if both are given.
ALIASES = {
    "random_seed": "seed",
    "min_length": "min_tokens",
    "stop": "stop_words",
    "n": "num_return_sequences",
    "include_stop_str_in_output": "include_stop_string",
    "structured_outputs": "guided_decoding",
    "num_logprobs": "logprobs",
    "num_prompt_logprobs": "prompt_logprobs",
    "request_output_len": "max_tokens",
    "streaming": "stream",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "len_penalty": "length_penalty",
    **{f"sampling_param_{name}": name for name in ("best_of", "temperature", "top_k", "top_p", "max_tokens", "seed")},
    **{f"sampling_param_{name}": name for name in ("frequency_penalty", "presence_penalty", "return_perf_metrics")},
    "sampling_param_stop": "stop_words",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
}

# Fields of vLLM's SamplingParams that are not tensors.
_JSON_FIELDS = {
    "logprobs": "int",
    "prompt_logprobs": "int",
    "best_of": "int",
    "include_stop_string": "bool",
    "guided_decoding": "json",
    "use_beam_search": "bool",
    "detokenize": "bool",
    "thinking_token_budget": "int",
    "reasoning_parser": "str",
    "mm_processor_kwargs": "json",
    "media_io_kwargs": "json",
    "tenant": "str",
    "lora_name": "str",
    "spaces_between_special_tokens": "bool",
}

# Accepted only as tensors of certain ensembles: a request parameter cannot change a request's kind.
_ONLY_TENSORS = (
    frozenset(
        tensor.name
        for tensor in (*IMAGE_INPUTS, *ENDPOINT_INPUTS, *TENSORRT_LLM_INPUTS, *LLMAPI_INPUTS, *RENAMED_INPUTS)
    )
    | {"lora_weights", "lora_config"}
) - {"early_stopping", "return_stop_reason", "lora_name"}

# Request parameters of Triton itself, of HTTP front ends or for the client's own bookkeeping.
_FOREIGN_PARAMETERS = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "timeout", "binary_data_output", "headers"}
    | {"model", "id", "user", "request_id", "timestamp"}
    | {"Streaming"}  # sent by clients of tensorrt_llm in addition to the input
)

_OWN_KINDS = {
    "prompt_token_ids": "ids",
    "messages": "chat",
    "trtllm_input_ids": "array",
    **dict.fromkeys(("image", "image_url", "image_url_input", "image_data"), "files"),
    "image_bytes_input": "shaped",
    "image_sizes_input": "shaped",
    "lora_weights": "shaped",
    "lora_config": "shaped",
}

_KINDS = {"STRING": "str", "BOOL": "bool", "INT32": "int", "UINT64": "int", "FP32": "float"}


class Fields(dict[str, Any]):
    """Typed values by canonical name; `spelling` has the name that the client used."""

    def __init__(self) -> None:
        super().__init__()
        self.spelling: dict[str, str] = {}


def _kind(name: str) -> str | None:
    if name in _JSON_FIELDS:
        return _JSON_FIELDS[name]
    if name == "logit_bias":
        return "json"
    if name in _OWN_KINDS:
        return _OWN_KINDS[name]
    tensor = TENSORS.get(name)
    if tensor is None:
        return None
    kind = _KINDS.get(tensor.dtype, "tensor")
    return kind + "s" if -1 in tensor.dims else kind


def collect_fields(tensors: Mapping[str, npt.NDArray[Any]], parameters: Mapping[str, Any] | None = None) -> Fields:
    """Typed values of all fields in the request, by canonical name.

    A tensor takes precedence over a request parameter, and that over a key of `sampling_parameters`. Raises
    InvalidRequestError.
    """
    parameters = {name: value for name, value in (parameters or {}).items() if not _is_foreign(name)}
    packed = tensors.get("sampling_parameters", parameters.pop("sampling_parameters", None))
    if isinstance(packed, np.ndarray):
        packed = _tensor_value("sampling_parameters", "str", packed)
    fields = Fields()
    for where, values in (
        ("sampling_parameters", json_object("sampling_parameters", packed or "")),
        ("request parameter", parameters),
        ("input", {name: array for name, array in tensors.items() if name != "sampling_parameters"}),
    ):
        for name in sorted(values, key=lambda name: name not in ALIASES):
            value, canonical = values[name], ALIASES.get(name, name)
            if (reason := _refusal(canonical)) is not None:
                if _asks(name, canonical, value):
                    raise InvalidRequestError(f"{name} is not served: {reason}")
                continue
            kind = _kind(canonical)
            is_tensor = isinstance(value, np.ndarray)
            if kind is None or canonical == "sampling_parameters" or (name in _ONLY_TENSORS and not is_tensor):
                raise InvalidRequestError(f"{where} {shown(name)} is unknown; allowed: {_known_names()}")
            if isinstance(value, np.ndarray):
                value = _tensor_value(name, kind, value)
            elif value is not None:
                value = coerce(name, kind, value)
            if value is not None:
                fields[canonical] = value
                fields.spelling[canonical] = name
    return fields


def coerce(name: str, kind: str, value: Any) -> Any:
    """`value` as `kind` (int, float, bool, str, ints, strs, ids, chat or json); numbers and flags may be strings.

    `ids` are integers, in any number: the codec knows how long a prompt may be. `chat` is a list, also as JSON text.
    `files` are bytes, or base64 as text.
    """
    if kind == "files":
        items = value if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(item, (str, bytes)) for item in items):
            raise InvalidRequestError(f"{name} is {shown(value)}; allowed: base64 of image files")
        return [item for item in items if item]  # some clients send it empty
    if kind == "chat":
        return value if isinstance(value, list) else _str(name, value)
    if kind == "ids":
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise InvalidRequestError(f"{name} is {shown(value)}; allowed: a list of token ids")
        return value
    if kind.endswith("s") and kind != "json":
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        longest = _LONGEST.get(ALIASES.get(name, name), MAX_LIST)
        if len(items) > longest:
            raise InvalidRequestError(f"{name} is {len(items)} entries; allowed: at most {longest}")
        return [_COERCIONS[kind[:-1]](name, item) for item in items]
    return _COERCIONS[kind](name, value)


def json_object(name: str, text: str | Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object in `text`; an empty text means an empty object."""
    if isinstance(text, Mapping):
        return dict(text)
    value = json_value(name, text) if str(text).strip() else {}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} is {shown(text)}; allowed: a JSON object")
    return value


def json_value(name: str, text: str) -> Any:
    """The value of a JSON text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, TypeError) as error:
        raise InvalidRequestError(f"{name} is {shown(text)}, which is not valid JSON ({error})") from None


def logit_bias(value: Any) -> dict[int, float]:
    """Token ids -> biases."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"logit_bias is {shown(value)}; allowed: a JSON object of token id to bias")
    bias = {}
    for key, number in value.items():
        try:
            bias[int(key)] = float(number)
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequestError(
                f"logit_bias has {shown(key)}: {shown(number)}; allowed: token ids and numbers"
            ) from None
    return bias


def shown(value: Any) -> str:
    """A wrong value for an error message: shortened, and quoted if it is text."""
    text = repr(value) if isinstance(value, (str, bytes)) else str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def _is_foreign(name: str) -> bool:
    return name in _FOREIGN_PARAMETERS or name.startswith("triton_")


def _known_names() -> str:
    served = [tensor.name for tensor in INPUTS if not tensor.refused]
    return ", ".join(sorted({*served, *_JSON_FIELDS, *ALIASES} - {"sampling_parameters"} - _ONLY_TENSORS))


def _refusal(name: str) -> str | None:
    """Why a field that clients know is not served; None for all others."""
    tensor = TENSORS.get(name)
    return (tensor.refused or None) if tensor is not None else None


def _asks(name: str, canonical: str, value: Any) -> bool:
    """Whether a field asks for something: some clients send it empty, 0 or false with every request."""
    if _kind(canonical) == "bool" and value is not None:
        return bool(_tensor_value(name, "bool", value) if isinstance(value, np.ndarray) else _bool(name, value))
    if isinstance(value, np.ndarray):
        return any(value.reshape(-1).tolist())
    return any(value) if isinstance(value, (list, tuple)) else bool(value)


def _tensor_value(name: str, kind: str, array: npt.NDArray[Any]) -> Any:
    if kind == "tensor":
        return None
    if kind == "shaped":
        return array
    if kind == "array":
        return array.reshape(-1)
    items = array.reshape(-1).tolist()
    if kind.endswith("s"):
        return coerce(name, kind, items)
    if len(items) != 1:
        raise InvalidRequestError(f"{name} has {len(items)} elements; allowed: exactly 1")
    return coerce(name, kind, items[0])


def _int(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = int(value)
        if isinstance(value, float) and number != value:
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise InvalidRequestError(f"{name} is {shown(value)}; allowed: an integer") from None
    if not -(2**63) <= number < 2**64:
        raise InvalidRequestError(f"{name} is {shown(value)}; allowed: an integer of 64 bits")
    return number


def _float(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise InvalidRequestError(f"{name} is {shown(value)}; allowed: a finite number") from None
    return number


def _bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    flag = {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())
    if flag is None:
        raise InvalidRequestError(f"{name} is {shown(value)}; allowed: true or false")
    return flag


def _str(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"{name} is not valid UTF-8 (byte {error.start})") from None
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} is {shown(value)}; allowed: a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name} holds a lone surrogate; allowed: Unicode text") from None
    return value


def _json(name: str, value: Any) -> Any:
    return json_value(name, _str(name, value)) if isinstance(value, (str, bytes)) else value


_COERCIONS: Mapping[str, Callable[[str, Any], Any]] = {
    "int": _int,
    "float": _float,
    "bool": _bool,
    "str": _str,
    "json": _json,
}
