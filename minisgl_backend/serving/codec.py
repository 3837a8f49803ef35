"""Triton requests -> validated engine requests: all checks of user input, and all defaults."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl_backend.arrays import Int32Array
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.ipc.wire import EngineRequest, OutputOptions
from minisgl_backend.parsers.thinking import TAIL, thinking_tags
from minisgl_backend.request import (
    GRAMMAR_KINDS,
    MAX_PRIORITY,
    MAX_TENANT_NAME,
    SCALAR_FIELDS,
    Grammar,
    SamplingParams,
)
from minisgl_backend.serving.adapter_fields import AdapterFields
from minisgl_backend.serving.fields import ALIASES, Fields, collect_fields, json_object, logit_bias, shown
from minisgl_backend.serving.image_codec import ImageCodec
from minisgl_backend.serving.pooling_codec import PoolingCodec
from minisgl_backend.serving.prompt_settings import CodecSettings, listed_messages

if TYPE_CHECKING:  # the engine front imports this module, but not the tokenizer's libraries
    from minisgl_backend.images.front import ImageFront, SeenPrompt
    from minisgl_backend.text.prompt_borders import PromptBorders
    from minisgl_backend.text.tokenizer import Tokenizer


class RequestCodec:
    """Validates and translates the requests of one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: CodecSettings,
        pooling: PoolingCodec | None = None,
        images: ImageFront | None = None,
        borders: PromptBorders | None = None,
        adapters: AdapterFields = AdapterFields(),
    ) -> None:
        """`pooling`: for requests for vectors, `images`: for images in prompts; None: they are refused. `borders`: of a
        model with states. `adapters`: those that requests may name by more than their names."""
        self._adapters = adapters
        self._borders = borders
        self._tokenizer = tokenizer
        self._images = ImageCodec(images, settings)
        self._pooling = pooling
        self._settings = settings

    def decode(
        self,
        tensors: Mapping[str, npt.NDArray[Any]],
        parameters: Mapping[str, Any] | None = None,
        *,
        deadline: float | None = None,
        request_id: str = "",
        only_counts: bool = False,
    ) -> tuple[Int32Array, EngineRequest]:
        """The prompt tokens (int32 [n]) and the rest of a request. Raises InvalidRequestError, and CapacityError where
        images wait. `only_counts`: nothing is to be computed, so no image is decoded."""
        tensors = dict(tensors)
        is_vllm, is_llmapi = "vllm_text_input" in tensors, "llmapi_text_input" in tensors
        if is_vllm or is_llmapi:
            tensors["text_input"] = tensors.pop("vllm_text_input" if is_vllm else "llmapi_text_input")
        if is_llmapi and "stop_request" in tensors and tensors["stop_request"].all():
            return _stop_request(request_id, answer="the request is cancelled, as its id's `stop` asks")
        fields = collect_fields(tensors, parameters)
        _refuse_what_is_not_served(fields)
        if fields.get("stop_request"):
            return _stop_request(request_id)
        if (pooled := self._pooled(fields, deadline, request_id)) is not None:
            return pooled
        if not self._settings.generates:
            raise InvalidRequestError("text_input: this model generates no text; allowed: embeddings and scores")
        text = ""
        prompt_ids: Sequence[int] | Int32Array
        seen: SeenPrompt | None = None
        if "trtllm_input_ids" in fields:
            prompt_ids = self._input_ids(fields)
        elif (seen := self._images.seen(fields)) is not None:
            text, prompt_ids = fields.get("text_input") or seen.prompt.text, seen.prompt.token_ids
        else:
            text, prompt_ids = self._prompt(fields)
        params = self._with_thinking_tags(self._params(fields), fields, prompt_ids)
        options = self._options(fields, params, is_vllm=is_vllm, is_llmapi=is_llmapi)
        options = _with_prompt(options, self._echoes(fields, is_llmapi), text, prompt_ids)
        priority = fields.get("priority", 0)
        if not 0 <= priority <= MAX_PRIORITY:
            raise InvalidRequestError(f"priority is {priority}; allowed: 0 (default), or 1 (first) to {MAX_PRIORITY}")
        stable_len, borders = (0, ()) if seen is not None else self._parts(fields, prompt_ids)
        spec = EngineRequest(
            params=self._images.masking(seen, params),
            options=options,
            stable_len=stable_len,
            borders=borders,
            priority=priority,
            deadline=deadline,
            request_id=request_id,
            tenant=_tenant(fields),
        )
        began = time.monotonic()
        if contents := self._images.contents(seen, params, only_counts=only_counts):
            spec = msgspec.structs.replace(spec, contents=contents, decode_s=time.monotonic() - began)
        return np.asarray(prompt_ids, dtype=np.int32), spec

    def _pooled(
        self, fields: Mapping[str, Any], deadline: float | None, request_id: str
    ) -> tuple[Int32Array, EngineRequest] | None:
        """None if the request asks for tokens."""
        for name in ("pooling_request", "embedding_request"):
            if not fields.get(name):
                continue
            if self._pooling is None:
                raise InvalidRequestError(f"{name} is not served: this server has no embeddings")
            decode = self._pooling.decode if name == "pooling_request" else self._pooling.decode_vllm
            return decode(fields[name], deadline=deadline, request_id=request_id)
        return None

    def _prompt(self, fields: Mapping[str, Any]) -> tuple[str, list[int]]:
        """The prompt's text, which `exclude_input_in_output=false` repeats, and its tokens."""
        text, messages = fields.get("text_input"), fields.get("messages")
        if fields.get("prompt_token_ids") is not None:
            return self._given_tokens(fields)
        if text is None and messages is None:
            raise InvalidRequestError("text_input and messages are both missing; allowed: exactly one of them")
        if text and messages:
            raise InvalidRequestError("text_input and messages are both given; allowed: exactly one of them")
        name = "messages" if messages or text is None else "text_input"
        given: Any = fields[name]
        self._settings.check_bytes(name, given)
        template = json_object("chat_template_kwargs", fields.get("chat_template_kwargs", ""))
        if name == "messages":
            echo = rendered = self._tokenizer.render(listed_messages(given), **template)
            special = fields.get("add_special_tokens", False)
        elif fields.get("apply_chat_template", self._settings.apply_chat_template):
            echo, special = given, fields.get("add_special_tokens", False)
            rendered = self._tokenizer.render([{"role": "user", "content": given}], **template)
        else:
            echo, rendered, special = given, given, fields.get("add_special_tokens", True)
        ids = self._tokenizer.encode(rendered, add_special_tokens=special)
        self._settings.check_prompt(name, ids)
        return echo, ids

    def _parts(self, fields: Mapping[str, Any], prompt_ids: Sequence[int] | Int32Array) -> tuple[int, tuple[int, ...]]:
        """`stable_len` and `borders` of the request."""
        as_tokens = "trtllm_input_ids" in fields or fields.get("prompt_token_ids") is not None
        if self._borders is None or as_tokens:
            return 0, ()
        if fields.get("messages"):
            chat = listed_messages(fields["messages"])
        elif fields.get("apply_chat_template", self._settings.apply_chat_template):
            chat = [{"role": "user", "content": fields["text_input"]}]
        else:
            return 0, ()
        template = json_object("chat_template_kwargs", fields.get("chat_template_kwargs", ""))
        return self._borders.of_chat(chat, template, list(prompt_ids))

    def _given_tokens(self, fields: Mapping[str, Any]) -> tuple[str, list[int]]:
        if fields.get("text_input") or fields.get("messages"):
            raise InvalidRequestError(
                "prompt_token_ids is given together with text_input or messages; allowed: exactly one of them"
            )
        ids: list[int] = fields["prompt_token_ids"]
        self._settings.check_prompt("prompt_token_ids", ids)
        return self._tokenizer.decode(ids) if self._echoes(fields) else "", ids

    def _input_ids(self, fields: Mapping[str, Any]) -> Int32Array:
        """The prompt of tensorrt_llm: the first `input_lengths` of `input_ids`."""
        for name in ("text_input", "messages", "prompt_token_ids"):
            if fields.get(name):
                raise InvalidRequestError(f"{name} and input_ids are both given; allowed: exactly one of them")
        given: Int32Array = fields["trtllm_input_ids"]
        length = fields.get("input_lengths", len(given))
        if not 1 <= length <= len(given):
            raise InvalidRequestError(f"input_lengths is {length}; allowed: 1 to {len(given)}, the tokens of input_ids")
        self._settings.check_prompt("input_ids", given[:length].tolist())
        return given[:length]

    def _params(self, fields: Fields) -> SamplingParams:
        values: dict[str, Any] = self._settings.generation.sampling_values()
        for name in SCALAR_FIELDS:
            field = ALIASES.get(name, name)
            if field in fields:
                values[name] = fields[field]
        values["lora_name"] = self._adapters.name_of(fields)
        values["stop"] = fields.get("stop_words", ())
        special = self._tokenizer.special_tokens
        values["stop_token_ids"] = (
            *fields.get("stop_token_ids", ()),
            *_stop_tokens(fields.get("stop_words_list", [])),
            # Their text is not part of an answer, so it would never be found there.
            *(special[text] for text in fields.get("stop_words", ()) if text in special),
        )
        bad_words = SamplingParams(bad_words=fields.get("bad_words", ()))
        bad_words.validate()
        values["bad_words"] = bad_words.bad_words
        listed = _token_words("bad_words_list", fields.get("bad_words_list", []))
        values["bad_words_token_ids"] = (*self._tokenizer.encode_words(bad_words.bad_words), *listed)
        values["logit_bias"] = logit_bias(fields.get("logit_bias"))
        values["grammar"] = _grammar(fields)
        self._apply_end_id(fields, values)
        if any(fields.get(name) for name in ("return_cumulative_logprob", "return_log_probs")):
            values.setdefault("logprobs", 0)
        params = SamplingParams(**values)
        try:
            params.validate(self._settings.vocab_size)
        except InvalidRequestError as error:
            name, _, rest = str(error).partition(" ")
            canonical = {"n": "num_return_sequences", "stop": "stop_words"}.get(name, name)
            raise InvalidRequestError(f"{fields.spelling.get(canonical, name)} {rest}") from None
        return params

    def _with_thinking_tags(
        self, params: SamplingParams, fields: Fields, prompt_ids: Sequence[int] | Int32Array
    ) -> SamplingParams:
        """Adds the tags of the thinking that `thinking_token_budget` limits."""
        budget = params.thinking_token_budget
        if budget is None:
            return params
        tokenizer = self._tokenizer
        tags = thinking_tags(
            fields.get("reasoning_parser", "auto"),
            budget,
            tokenizer.chat_template,
            tokenizer.added_tokens,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            tokenizer.decode(list(prompt_ids[-TAIL:])),
        )
        return msgspec.structs.replace(params, thinking_tags=tags)

    def _apply_end_id(self, fields: Mapping[str, Any], values: dict[str, Any]) -> None:
        end_id = fields.get("end_id")
        if end_id is None or end_id in self._settings.eos_token_ids:
            return
        values["ignore_eos"] = True
        if end_id != -1:  # -1 is tensorrtllm_backend's way of saying that no token ends the text
            values["stop_token_ids"] = (*values["stop_token_ids"], end_id)

    def _echoes(self, fields: Mapping[str, Any], is_llmapi: bool = False) -> bool:
        """Whether the answer begins with the prompt."""
        # A stream is deltas only, whatever exclude_input_in_output says: NVIDIA's own client always sends false.
        if fields.get("stream", False):
            return False
        # Clients of tensorrt_llm expect the prompt by default.
        default = self._settings.exclude_input_in_output and "trtllm_input_ids" not in fields and not is_llmapi
        return not fields.get("exclude_input_in_output", default)

    def _options(
        self, fields: Mapping[str, Any], params: SamplingParams, *, is_vllm: bool, is_llmapi: bool
    ) -> OutputOptions:
        token_ids = "trtllm_input_ids" in fields
        # In vllm_backend `logprobs` is the number of alternatives, and only `return_logprobs` requests the output.
        wants_logprobs = fields.get("return_logprobs", not is_vllm and "logprobs" in fields)
        return OutputOptions(
            llmapi=is_llmapi,
            stream=fields.get("stream", False),
            token_ids=token_ids,
            apart=token_ids or "num_responses" in fields,
            finish_reason=fields.get("return_finish_reason", False),
            stop_reason=fields.get("return_stop_reason", False),
            cumulative_logprob=fields.get("return_cumulative_logprob", False),
            logprobs=wants_logprobs,
            token_bytes=not is_vllm,
            null_logprobs=wants_logprobs and "logprobs" not in fields,
            prompt_logprobs=params.prompt_logprobs is not None,
            num_input_tokens=fields.get("return_num_input_tokens", False),
            num_output_tokens=fields.get("return_num_output_tokens", False),
            log_probs=fields.get("return_log_probs", False),
            perf_metrics=fields.get("return_perf_metrics", False),
            final_perf_metrics=fields.get("return_final_perf_metrics", False),
        )


def _stop_request(request_id: str, answer: str = "") -> tuple[Int32Array, EngineRequest]:
    """`answer`: the error that the request ends with, as with TensorRT-LLM's LLM API."""
    if not request_id:
        raise InvalidRequestError("stop is true and the request has no id; allowed: the id of the request to stop")
    spec = EngineRequest(
        params=SamplingParams(), options=OutputOptions(), request_id=request_id, stop=True, answer=answer
    )
    return np.zeros(1, dtype=np.int32), spec


def _with_prompt(
    options: OutputOptions, echoes: bool, text: str, prompt_ids: Sequence[int] | Int32Array
) -> OutputOptions:
    if not echoes:
        return options
    if options.token_ids:
        return msgspec.structs.replace(options, prompt_ids=np.asarray(prompt_ids, dtype="<i4").tobytes())
    return msgspec.structs.replace(options, prompt=text)


def _token_words(name: str, flat: Sequence[int]) -> list[tuple[int, ...]]:
    """TensorRT-LLM's word lists, [2, n]: the token ids of all words in one row, and the end of each word in the
    other."""
    half = len(flat) // 2
    words, start = [], 0
    for end in flat[half:]:
        if end < 0:  # padding
            break
        if not start < end <= half:
            raise InvalidRequestError(f"{name} has a word from {start} to {end}; allowed: rising ends, up to {half}")
        words.append(tuple(flat[start:end]))
        start = end
    return words


def _stop_tokens(flat: Sequence[int]) -> list[int]:
    words = _token_words("stop_words_list", flat)
    for word in words:
        if len(word) > 1:
            raise InvalidRequestError(
                f"stop_words_list has a word of {len(word)} tokens; allowed: 1 (stop_words takes texts of any length)"
            )
    return [word[0] for word in words]


def _refuse_what_is_not_served(fields: Mapping[str, Any]) -> None:
    num_sequences = fields.get("num_return_sequences", 1)
    for name, allowed in (("beam_width", (0, 1)), ("best_of", (0, 1, num_sequences))):
        if fields.get(name, 1) not in allowed:
            also = " or n" if name == "best_of" else ""
            raise InvalidRequestError(f"{name} is {fields[name]}; allowed: 1{also} (this server has no beam search)")
    if fields.get("use_beam_search"):
        raise InvalidRequestError("use_beam_search is true; allowed: false (this server has no beam search)")
    if fields.get("detokenize") is False:
        raise InvalidRequestError("detokenize is false; allowed: true")


def _tenant(fields: Mapping[str, Any]) -> str:
    name: str = fields.get("tenant", "")
    if len(name) > MAX_TENANT_NAME or not (name.isascii() and name.isprintable()):
        raise InvalidRequestError(
            f"tenant is {shown(name)}; allowed: at most {MAX_TENANT_NAME} printable ASCII characters"
        )
    return name


def _grammar(fields: Mapping[str, Any]) -> Grammar | None:
    kind, text = fields.get("guided_decoding_guide_type"), fields.get("guided_decoding_guide", "")
    if kind is None and not text:
        return _vllm_grammar(fields.get("guided_decoding"))
    if kind not in GRAMMAR_KINDS:
        raise InvalidRequestError(f"guided_decoding_guide_type is {shown(kind)}; allowed: {', '.join(GRAMMAR_KINDS)}")
    if kind != "json" and not text:
        raise InvalidRequestError(f"guided_decoding_guide is missing; {kind} needs it")
    return Grammar(kind=kind, text="" if kind == "json" else text)


def _vllm_grammar(guided: Any) -> Grammar | None:
    if not guided:
        return None
    given = [(key, value) for key, value in guided.items() if value] if isinstance(guided, dict) else []
    key, value = given[0] if len(given) == 1 else ("", None)
    if key == "json_object":
        return Grammar(kind="json_schema", text='{"type": "object"}')
    if key in ("json", "structural_tag"):
        text = value if isinstance(value, str) else json.dumps(value)
        return Grammar(kind="json_schema" if key == "json" else "structural_tag", text=text)
    if key in ("regex", "grammar") and isinstance(value, str):
        return Grammar(kind="regex" if key == "regex" else "ebnf_grammar", text=value)
    if key == "choice" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return Grammar(kind="ebnf_grammar", text="root ::= " + " | ".join(map(_quoted, value)))
    raise InvalidRequestError(
        f"guided_decoding is {shown(guided)}; allowed: one of json, json_object, regex, grammar, choice, structural_tag"
    )


def _quoted(text: str) -> str:
    """A literal of an EBNF grammar: JSON's escapes, but characters as they are, since the compiler splits
    surrogates."""
    return json.dumps(text, ensure_ascii=False)
