"""Fields shared by all endpoints that generate: sampling options and constraints of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from minisgl_backend.openai.errors import invalid
from minisgl_backend.request import MAX_LOGIT_BIAS, MAX_SEQUENCES_PER_REQUEST, SamplingParams

MAX_FIELDS = 256  # of an object with named fields; the largest has fewer

# Collects unknown fields while a request is read that may have some (--ignore-unknown-fields); otherwise None.
IGNORE: ContextVar[Callable[[str], None] | None] = ContextVar("ignore", default=None)

# Options of vLLM, SGLang, TensorRT-LLM and llama.cpp that have no effect at these values; others are not allowed.
CHANGES_NOTHING: Mapping[str, Any] = {
    "early_stopping": False,
    "length_penalty": 1,
    "num_beams": 1,
    "beam_width": 1,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "return_hidden_states": False,
    "no_stop_trim": False,
    "guided_json_object": False,
    "allowed_token_ids": [],
    "logits_processors": [],
    "vllm_xargs": {},
    "cache_prompt": True,
    "typical_p": 1,
    "mirostat": 0,
    "functions": [],
    "transforms": [],
}


def check_entries(values: Any, most: int) -> Any:
    """Checks the number before the entries: of millions of wrong ones, each would become an error of its own."""
    if isinstance(values, dict) and len(values) > most:
        raise PydanticCustomError("too_long", "at most {max_length} entries", {"max_length": most})
    return values


# Validation of all lists stops at their first wrong entry, for the same reason.
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Biases = Annotated[dict[str, float], BeforeValidator(lambda values: check_entries(values, MAX_LOGIT_BIAS))]


class Model(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    may_lose_fields: ClassVar[bool] = True  # unknown ones, with --ignore-unknown-fields

    @model_validator(mode="before")
    @classmethod
    def _check_entries(cls, values: Any) -> Any:
        """Treats null as absent, as clients send it for unused fields, even for one that is not served."""
        checked = check_entries(values, MAX_FIELDS)
        if not isinstance(checked, dict):
            return checked
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {name: value for name, value in checked.items() if value is not None or name in known}
        ignore = IGNORE.get()
        if ignore is not None and cls.may_lose_fields:
            for name in kept.keys() - known:
                ignore(name)
                del kept[name]
        return kept


class Constraint(Model):
    """A format or a function: an answer without what an unknown field asks for would be another one."""

    may_lose_fields = False


class StreamOptions(Model):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far with every chunk
    include_obfuscation: bool | None = None  # has no effect: it is never done


class JsonSchema(Constraint):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Constraint):
    """OpenAI's formats, and those of other servers: TGI has `value`, llama.cpp, Together and others `schema`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    value: dict[str, Any] | str | bool | None = None
    pattern: str | None = None
    grammar: str | None = None

    def constraint(self) -> dict[str, Any] | None:
        """The constraint of the answer as the server takes it. Raises ApiError."""
        places = {
            "json_schema.schema": None if self.json_schema is None else self.json_schema.schema_,
            "schema": self.schema_,
            "value": self.value,
            "pattern": self.pattern,
            "grammar": self.grammar,
        }
        allowed = _FORMATS[self.type]
        names = [name for name, value in places.items() if value is not None]
        for number, name in enumerate(names):
            if number or name not in allowed:
                said = " or ".join(f"response_format.{one}" for one in allowed) or "nothing else"
                beside = f" and response_format.{names[0]}" if number else ""
                reason = f"is given with type {self.type}{beside}; allowed: {said}"
                raise invalid("response_format", f"response_format.{name} {reason}")
        if not names and self.type != "json_object" and allowed:
            raise invalid("response_format", f"response_format.{allowed[0]} is missing; {self.type} needs it")
        value = places[names[0]] if names else None
        if self.type in ("regex", "grammar"):
            return _constraint("response_format", self.type, value)
        if self.type == "text":
            return None
        if value is None or value == {}:
            return {"json_object": True}
        if self.type == "json_schema" and isinstance(value, dict) and names == ["value"]:
            value = value.get("schema", value)  # TGI's, with a name beside it
        return _constraint("response_format", "json", value)


class StructuredOutputs(Constraint):
    """vLLM's name for constraints of the answer."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Named(Model):
    """What every request may say of itself: its model, its id by either name, and its user."""

    model: str | None = None
    lora_path: str | None = None  # SGLang's: the name of an adapter, where `model` names none
    request_id: str | None = None  # like the header X-Request-Id; vLLM's and SGLang's name
    rid: str | None = None
    # The tenant, with --tenants user; otherwise without effect.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None


class Sampling(Named):
    """The fields of every endpoint that generates. Absent sampling options take the model's own defaults."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | Texts | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    # Beyond OpenAI, by vLLM's names.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    thinking_token_budget: int | None = None
    cache_salt: str | None = None
    speculative: bool | None = None  # false: disables speculation for this request
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None  # SGLang's names of three of these
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    guided_decoding_backend: str | None = None  # has no effect: there is only one backend
    use_beam_search: bool | None = None
    # Sent by OpenAI's clients, without effect here.
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def thinking_budget(self) -> int | None:
        """Maximum number of reasoning tokens, by any of its names; None: no limit."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            name: value
            for name, value in values.items()
            if name not in CHANGES_NOTHING or name in cls.model_fields or not _is_same(value, CHANGES_NOTHING[name])
        }


class Generating(Sampling):
    """The further fields that chats and completions share."""

    n: int | None = None
    best_of: int | None = None  # only 1 or n
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    return_perf_metrics: bool | None = None  # the server's times, with the last chunk or the answer

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_with_every_chunk(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def wants_figures(self) -> bool:
        """Whether the server's metrics of the request are needed, which include the number of cached tokens."""
        return bool(not self.stream or self.include_usage or self.return_perf_metrics)

    @property
    def num_choices(self) -> int:
        """Sequences per prompt."""
        return 1 if self.n is None else self.n

    def sampling(self) -> dict[str, Any]:
        """The options by vLLM's names, as in the tokenizer's `sampling_parameters`."""
        values = {name: value for name in _SAMPLING if (value := getattr(self, name, None)) is not None}
        guided = self._guided()
        if guided is not None:
            values["guided_decoding"] = guided[1]
        return values

    def names(self) -> dict[str, str]:
        """The client's names of fields that the server knows by another name."""
        guided = self._guided()
        field = "response_format" if guided is None else guided[0]
        return {
            "guided_decoding": field,
            "guided_decoding_guide": field,
            "guided_decoding_guide_type": field,
            "num_return_sequences": "n",
            "stop_words": "stop",
            "include_stop_string": "include_stop_str_in_output",
        }

    def check(self) -> None:
        """Raises ApiError for errors other than types."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options is given; allowed: only with stream=true")
        if not 1 <= self.num_choices <= MAX_SEQUENCES_PER_REQUEST:
            raise invalid("n", f"n is {self.n}; allowed: 1 to {MAX_SEQUENCES_PER_REQUEST}")
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, name, None)
            if value is not None and value >= 2**31:
                raise invalid(name, f"{name} is {value}; allowed: below 2**31")
        self._guided()

    @property
    def is_guided(self) -> bool:
        """A grammar constrains the answer."""
        return self._guided() is not None

    def _guided(self) -> tuple[str, dict[str, Any]] | None:
        """(the client's field, the constraint)."""
        found: dict[str, dict[str, Any]] = {}
        if self.response_format is not None and (kept := self.response_format.constraint()) is not None:
            found["response_format"] = kept
        for name, key in _GUIDED:
            if (value := getattr(self, name)) is not None:
                found[name] = _constraint(name, key, value)
        if self.structured_outputs is not None:
            fields = self.structured_outputs
            for attribute, key in _STRUCTURED:
                value = getattr(fields, attribute)
                if value is not None and not (key == "json_object" and value is False):
                    name = f"structured_outputs.{key}"
                    found[name] = {"json_object": True} if key == "json_object" else _constraint(name, key, value)
        if len(found) > 1:
            first, second, *_ = found
            raise invalid(second, f"{second} is given together with {first}; allowed: one constraint of the answer")
        return next(iter(found.items()), None)


def _is_same(value: Any, neutral: Any) -> bool:
    """JSON equality, where true is not a number."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def is_unicode(value: Any) -> bool:
    """Whether the value can be written as JSON: JSON input may contain lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def check_unicode(name: str, value: Any) -> None:
    """Raises ApiError that names the field `name` if its value cannot be written as JSON."""
    if not is_unicode(value):
        raise invalid(name, f"{name} holds a lone surrogate; allowed: Unicode")


def given(**values: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _constraint(name: str, key: str, value: Any) -> dict[str, Any]:
    if key == "json":
        return {"json": value if isinstance(value, str) else json.dumps(value)}
    if not value:
        raise invalid(name, f"{name} is empty; allowed: at least one character or entry")
    return {key: value}


# Types of response_format -> where the constraint may stand, the usual place first.
_SCHEMAS = ("json_schema.schema", "schema", "value")
_FORMATS: Mapping[str, Sequence[str]] = {
    "text": (),
    "json_object": _SCHEMAS,
    "json_schema": _SCHEMAS,
    "json": ("value", "schema"),
    "regex": ("value", "pattern"),
    "grammar": ("grammar", "value"),
}
_GUIDED = (
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("regex", "regex"),
    ("ebnf", "grammar"),
    ("json_schema", "json"),
)
_STRUCTURED = (
    ("json_", "json"),
    ("regex", "regex"),
    ("choice", "choice"),
    ("grammar", "grammar"),
    ("json_object", "json_object"),
)
# Sampling parameters that have another form in OpenAI's API.
_OTHERWISE = ("logprobs", "prompt_logprobs", "grammar", "bad_words_token_ids", "thinking_tags", "thinking_token_budget")
_SAMPLING = (
    *(name for name in SamplingParams.__struct_fields__ if name not in _OTHERWISE),
    *("add_special_tokens", "priority", "use_beam_search", "best_of"),
)
