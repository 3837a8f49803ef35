"""What clients may send, as pydantic models: types are checked here, values by the server, which names the field.

Unknown fields are refused: a misspelt option that is silently ignored costs more than an error.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from minisgl_backend.openai.errors import invalid
from minisgl_backend.request import MAX_SEQUENCES_PER_REQUEST

MAX_PROMPTS = 1024  # of one request to /v1/completions
MAX_TOOLS = 512
MAX_CHOICES = 256  # sequences of one request: prompts times n
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's

TokenIds = list[int]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Model):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far with every chunk
    include_obfuscation: bool | None = None  # never done


class JsonSchema(_Model):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Model):
    """vLLM's name for what constrains an answer."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _Generation(_Model):
    """What both endpoints take. Absent sampling options take the model's own defaults."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    # Beyond OpenAI, by vLLM's names.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: bool | None = None
    return_perf_metrics: bool | None = None  # the server's times, with the last chunk or the answer
    # Sent by OpenAI's clients, and without a meaning here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_with_every_chunk(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        """Sequences of each prompt."""
        return 1 if self.n is None else self.n

    def sampling(self) -> dict[str, Any]:
        """The options by vLLM's names, as the tokenizer's `sampling_parameters` takes them."""
        values = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        guided = self._guided()
        if guided is not None:
            values["guided_decoding"] = guided[1]
        if self.return_perf_metrics:  # once: they go with the last chunk
            values["return_final_perf_metrics"] = True
        return values

    def names(self) -> dict[str, str]:
        """What the client called the fields that the server knows by another name."""
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
        """Raises ApiError for what is wrong beyond types."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options is given; allowed: only with stream=true")
        if not 1 <= self.num_choices <= MAX_SEQUENCES_PER_REQUEST:
            raise invalid("n", f"n is {self.n}; allowed: 1 to {MAX_SEQUENCES_PER_REQUEST}")
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, name, None)
            if value is not None and value >= 2**31:
                raise invalid(name, f"{name} is {value}; allowed: below 2**31")
        self._guided()

    def _guided(self) -> tuple[str, dict[str, Any]] | None:
        """(the client's field, the constraint)."""
        given: dict[str, dict[str, Any]] = {}
        form = self.response_format
        if form is not None and form.type == "json_object":
            given["response_format"] = {"json_object": True}
        elif form is not None and form.type == "json_schema":
            if form.json_schema is None or form.json_schema.schema_ is None:
                raise invalid("response_format", "response_format.json_schema.schema is missing; json_schema needs it")
            given["response_format"] = {"json": json.dumps(form.json_schema.schema_)}
        for name, key in _GUIDED:
            if (value := getattr(self, name)) is not None:
                given[name] = _constraint(name, key, value)
        if self.structured_outputs is not None:
            fields = self.structured_outputs
            for attribute, key in _STRUCTURED:
                value = getattr(fields, attribute)
                if value is not None and not (key == "json_object" and value is False):
                    name = f"structured_outputs.{key}"
                    given[name] = {"json_object": True} if key == "json_object" else _constraint(name, key, value)
        if len(given) > 1:
            first, second, *_ = given
            raise invalid(second, f"{second} is given beside {first}; allowed: one constraint of the answer")
        return next(iter(given.items()), None)


def _constraint(name: str, key: str, value: Any) -> dict[str, Any]:
    if key == "json":
        return {"json": value if isinstance(value, str) else json.dumps(value)}
    if not value:
        raise invalid(name, f"{name} is empty; allowed: at least one character or entry")
    return {key: value}


_GUIDED = (
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
)
_STRUCTURED = (
    ("json_", "json"),
    ("regex", "regex"),
    ("choice", "choice"),
    ("grammar", "grammar"),
    ("json_object", "json_object"),
)
_SAMPLING = (
    *("n", "max_tokens", "temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("bad_words", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens", "priority"),
    "use_beam_search",
)


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)] | TokenIds | list[TokenIds]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None

    @property
    def prompts(self) -> Sequence[str | TokenIds]:
        """At least one of them, each a text or token ids."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def only_echo(self) -> bool:
        """Nothing is to be generated: OpenAI's way to have the log-probabilities of a text."""
        return self.max_tokens == 0 and bool(self.echo)

    def check(self) -> None:
        super().check()
        if not self.prompts:
            raise invalid("prompt", "prompt is empty; allowed: at least one prompt")
        if len(self.prompts) > MAX_PROMPTS:
            raise invalid("prompt", f"prompt has {len(self.prompts)} entries; allowed: at most {MAX_PROMPTS}")
        if len(self.prompts) * self.num_choices > MAX_CHOICES and len(self.prompts) > 1:
            choices = f"{len(self.prompts)} prompts times n are more than {MAX_CHOICES} choices"
            raise invalid("prompt", f"prompt: {choices}; allowed: at most {MAX_CHOICES}")
        if self.suffix:
            raise invalid("suffix", "suffix is given; this server has no models that fill in")

    def sampling(self) -> dict[str, Any]:
        values = super().sampling()
        values["max_tokens"] = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if self.only_echo:
            values["max_tokens"] = 1
        for name in ("best_of", "logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                values[name] = value
        if self.echo and self.logprobs is not None:
            values["prompt_logprobs"] = self.logprobs
        return values

    def names(self) -> dict[str, str]:
        return {**super().names(), "text_input": "prompt", "prompt_token_ids": "prompt"}


class FunctionDefinition(_Model):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Model):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(_Model):
    name: str


class NamedTool(_Model):
    type: Literal["function"]
    function: FunctionName


class Message(BaseModel):
    """Role and content, and whatever else the chat template reads."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Any = None

    def for_template(self, place: int) -> dict[str, Any]:
        """As templates expect it: content as one text, arguments of tool calls as objects. Raises ApiError."""
        message = {**(self.model_extra or {}), "role": self.role, "content": self._text(f"messages[{place}].content")}
        calls = message.get("tool_calls")
        if calls is None:
            message.pop("tool_calls", None)
        else:
            message["tool_calls"] = _template_calls(calls, f"messages[{place}].tool_calls")
        return message

    def _text(self, name: str) -> str:
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        if not isinstance(self.content, list):
            raise invalid("messages", f"{name} is {_shown(self.content)}; allowed: a text or a list of parts")
        return "\n".join(_part_text(part, f"{name}[{number}]") for number, part in enumerate(self.content))


def _part_text(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text", "refusal"):
        kind = part.get("type") if isinstance(part, dict) else part
        raise invalid("messages", f"{name}.type is {_shown(kind)}; allowed: text (this server has no other inputs)")
    text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise invalid("messages", f"{name}.text is {_shown(text)}; allowed: a text")
    return text


def _template_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid("messages", f"{name} is {_shown(calls)}; allowed: a list")
    found = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid("messages", f"{name}[{number}].function.name is missing; allowed: a function's name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # What is no JSON goes back to the model as it once wrote it.
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments or "{}")
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: str | None = None
    # Beyond OpenAI, by vLLM's names.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    separate_reasoning: bool | None = None  # SGLang's: false leaves the thoughts in the content

    @property
    def choice(self) -> str | NamedTool:
        """What of the tools is to be used."""
        if not self.tools:
            return "none"
        return "auto" if self.tool_choice is None else self.tool_choice

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", f"top_logprobs is {self.top_logprobs}; allowed: only with logprobs=true")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message",
                "continue_final_message is true beside add_generation_prompt; allowed: one of them",
            )
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise invalid("tool_choice", "tool_choice is given without tools; allowed: none")
        if isinstance(self.choice, NamedTool):
            self._tool(self.choice.function.name)
        if self.choice not in ("none", "auto") and self._guided() is not None:
            name = (self._guided() or ("",))[0]
            raise invalid(name, f"{name} is given beside tool_choice, which constrains the answer, too; allowed: one")

    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets beside the messages."""
        kwargs = dict(self.chat_template_kwargs or {})
        for name in ("add_generation_prompt", "continue_final_message", "documents", "reasoning_effort"):
            if (value := getattr(self, name)) is not None:
                kwargs[name] = value
        if self.tools and self.choice != "none":
            kwargs["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return kwargs

    def sampling(self) -> dict[str, Any]:
        values = super().sampling()
        if self.max_completion_tokens is not None:
            values["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        if self.choice not in ("none", "auto"):
            values["guided_decoding"] = {"json": json.dumps(self.tool_schema())}
        return values

    def names(self) -> dict[str, str]:
        names = super().names()
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.choice not in ("none", "auto"):
            names |= dict.fromkeys(("guided_decoding", "guided_decoding_guide"), "tools")
        return {**names, "logprobs": "top_logprobs"}

    def tool_schema(self) -> Mapping[str, Any]:
        """The JSON schema of an answer with tool_choice `required` (a list of calls) or a name (its arguments)."""
        if isinstance(self.choice, NamedTool):
            return self._tool(self.choice.function.name).function.parameters or {"type": "object"}
        tools = [tool.function for tool in self.tools or ()]
        # References inside a function's schema start at its root, which is not that of the whole.
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [tool.name]},
                    "parameters": tool.parameters or {"type": "object"},
                },
                "required": ["name", "parameters"],
            }
            for tool in tools
        ]
        definitions: dict[str, Any] = {}
        for tool in tools:
            for key in ("$defs", "definitions"):
                found = (tool.parameters or {}).get(key)
                if isinstance(found, dict):
                    definitions.setdefault(key, {}).update(found)
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **definitions}
        return schema if self.parallel_tool_calls is not False else {**schema, "maxItems": 1}

    def _tool(self, name: str) -> Tool:
        for tool in self.tools or ():
            if tool.function.name == name:
                return tool
        raise invalid("tool_choice", f"tool_choice names {name!r}; allowed: one of the functions in tools")


class TokenizeRequest(_Model):
    """POST /tokenize: a prompt, or messages as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "prompt and messages: allowed: exactly one of them")

    def template_kwargs(self) -> dict[str, Any]:
        kwargs = dict(self.chat_template_kwargs or {})
        for name in ("add_generation_prompt", "continue_final_message"):
            if (value := getattr(self, name)) is not None:
                kwargs[name] = value
        if self.tools:
            kwargs["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return kwargs


class DetokenizeRequest(_Model):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
