"""Requests for vectors: a client's texts and options -> prompts and pooling parameters for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.ipc.wire import EngineRequest, OutputOptions
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.request import MAX_PRIORITY, MAX_TENANT_NAME, NO_SAMPLING, PoolingParams, check_prompt
from minisgl_backend.serving.fields import shown
from minisgl_backend.text import scoring

if TYPE_CHECKING:
    from minisgl_backend.text.tokenizer import Tokenizer

MAX_PROMPTS = 1 << 13  # of one request: enough for the most questions with the most choices
MAX_TOKENS = 1 << 22  # of all its prompts together
_LEAST_TEXT_BYTES = 1 << 20  # allowed for any text; or 64 per token of the context, if that is more


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The JSON of the input `pooling_request`. Exactly one of the first four says what is turned into vectors."""

    texts: list[str] | None = None
    token_ids: list[list[int]] | None = None
    documents: list[str] | None = None  # scored against `queries`
    messages: list[list[dict[str, Any]]] | None = None  # chats, for `choices`
    queries: list[str] = []  # one for all documents, or one for each
    most_document_tokens: int | None = None  # longer documents are truncated
    instruction: str | None = None
    raw_scores: bool = False  # as they are before the logistic function
    choices: list[list[str]] | None = (
        None  # one list per prompt: words whose log-probabilities as the next token are requested
    )
    dimensions: int | None = None
    normalize: bool | None = None
    pooling: str | None = None
    most_tokens: int | None = None  # of a prompt: longer ones are truncated
    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None
    tenant: str = ""
    suffixes: list[str] = []  # appended to each rendered chat; []: none
    template: dict[str, Any] = {}  # arguments of the chat template


class VllmRequest(msgspec.Struct, frozen=True):
    """vllm_backend's `embedding_request`."""

    input: str | list[int]
    pooling_params: dict[str, Any] = {}


class PoolingCodec:
    """Validates and translates one model's requests for vectors."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig, max_seq_len: int, *, enabled: bool) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._max_seq_len = max_seq_len
        self._enabled = enabled

    def decode(self, text: str, *, deadline: float | None, request_id: str) -> tuple[Int32Array, EngineRequest]:
        """The tokens of all prompts, int32 [num_tokens], and the rest of the request. Raises InvalidRequestError."""
        request = _decoded("pooling_request", text, PoolingRequest)
        return self._translate(request, OutputOptions(), deadline, request_id)

    def decode_vllm(self, text: str, *, deadline: float | None, request_id: str) -> tuple[Int32Array, EngineRequest]:
        """The same for vllm_backend's `embedding_request`, which is answered with a JSON list as text."""
        given = _decoded("embedding_request", text, VllmRequest)
        params = {name: value for name, value in given.pooling_params.items() if value is not None}
        known = {"dimensions": "dimensions", "normalize": "normalize", "use_activation": "normalize"}
        known["truncate_prompt_tokens"] = "most_tokens"
        values: dict[str, Any] = {}
        for name, value in params.items():
            if name not in known:
                allowed = ", ".join(known)
                raise InvalidRequestError(
                    f"embedding_request has pooling_params.{name}, which is not served; allowed: {allowed}"
                )
            values[known[name]] = value
        values |= {"texts": [given.input]} if isinstance(given.input, str) else {"token_ids": [given.input]}
        request = _converted("embedding_request", values)
        return self._translate(request, OutputOptions(vector_as_text=True), deadline, request_id)

    def _translate(
        self, request: PoolingRequest, options: OutputOptions, deadline: float | None, request_id: str
    ) -> tuple[Int32Array, EngineRequest]:
        if not self._enabled:
            raise InvalidRequestError("enable_embeddings is false; allowed: requests for text")
        if not 0 <= request.priority <= MAX_PRIORITY:
            raise InvalidRequestError(f"priority is {request.priority}; allowed: 0 to {MAX_PRIORITY}")
        if len(request.tenant) > MAX_TENANT_NAME or not (request.tenant.isascii() and request.tenant.isprintable()):
            raise InvalidRequestError(f"tenant is {shown(request.tenant)}; allowed: {MAX_TENANT_NAME} ASCII characters")
        params = msgspec.structs.replace(NO_SAMPLING, cache_salt=request.cache_salt, lora_name=request.lora_name)
        params.validate()
        prompts, poolings, way = self._prompts(request)
        ids = np.array([token for prompt in prompts for token in prompt], dtype=np.int32)
        lengths = np.array([len(prompt) for prompt in prompts], dtype="<i4").tobytes()
        spec = EngineRequest(
            params=params,
            options=options,
            priority=request.priority,
            deadline=deadline,
            request_id=request_id,
            tenant=request.tenant,
            poolings=tuple(poolings),
            lengths=lengths,
            scoring=way,
            raw_scores=request.raw_scores or self._model.scores.raw,
            leads=request.messages is not None,
            num_queries=max(1, len(request.queries)),
        )
        return ids, spec

    def _prompts(self, request: PoolingRequest) -> tuple[list[list[int]], Sequence[PoolingParams], str]:
        """Prompts, pooling parameters (one for each prompt, or one for all), and how scores are computed from the
        vectors."""
        given = [name for name in ("texts", "token_ids", "documents", "messages") if getattr(request, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(f"{' and '.join(given) or 'texts'}: allowed: exactly one of texts and token_ids")
        (name,) = given
        items: Sequence[Any] = getattr(request, name)
        if not 1 <= len(items) <= MAX_PROMPTS:
            raise InvalidRequestError(f"{name} is {len(items)} entries; allowed: 1 to {MAX_PROMPTS}")
        way, limit = "", self._limit(request.most_tokens)
        if name in ("texts", "documents"):
            items = [self._bounded(name, text, cut=limit is not None) for text in items]
        for text in request.queries:
            self._bounded("queries", text)
        poolings: Sequence[PoolingParams]
        if name == "documents":
            if len(request.queries) not in (1, len(items)):
                raise InvalidRequestError(f"queries is {len(request.queries)} entries; allowed: 1, or {len(items)}")
            way = scoring.scoring_of(self._model)
            documents = [self._cut(text, request.most_document_tokens) for text in items]
            prompts, poolings = self._pairs(request, documents, limit)
        elif name == "messages":
            prompts, poolings = self._chats(request)
        else:
            prompts = [self._encoded(text, limit) for text in items] if name == "texts" else list(items)
            poolings = [
                scoring.embedding_params(
                    self._model, dimensions=request.dimensions, normalize=request.normalize, pooling=request.pooling
                )
            ]
        return self._fitted(name, prompts, limit), poolings, way

    def _pairs(
        self, request: PoolingRequest, documents: list[str], limit: int | None
    ) -> tuple[list[list[int]], Sequence[PoolingParams]]:
        """The prompts that score each document, and their pooling parameters.

        In a prompt that is too long the document is cut, and what stands behind it stays.
        """
        model, tokenizer, queries = self._model, self._tokenizer, request.queries
        prompts, pooling = scoring.pair_prompts(model, tokenizer, queries, documents, request.instruction)
        if limit is None:
            return prompts, [pooling]
        if scoring.scoring_of(model) == "cosine":
            return [self._encoded(text, limit) for text in (*queries, *documents)], [pooling]
        for index, document in enumerate(documents):
            query = queries[index if len(queries) > 1 else 0]
            ids = tokenizer.encode(document, add_special_tokens=False) if len(prompts[index]) > limit else []
            while len(prompts[index]) > limit and ids:
                ids = ids[: limit - len(prompts[index])]
                cut = tokenizer.decode(ids)
                (prompts[index],), _ = scoring.pair_prompts(model, tokenizer, [query], [cut], request.instruction)
            if len(prompts[index]) > limit:
                allowed = f"queries that leave room for a document in {limit} tokens"
                raise InvalidRequestError(f"queries has a text of {len(query)} characters; allowed: {allowed}")
        return prompts, [pooling]

    def _encoded(self, text: str, limit: int | None) -> list[int]:
        """The text's tokens, cut if there are more than `limit`: the special tokens around them stay."""
        ids = self._tokenizer.encode(text)
        if limit is None or len(ids) <= limit:
            return ids
        plain = self._tokenizer.encode(text, add_special_tokens=False)
        num_special = len(ids) - len(plain)
        begins = [at for at in range(num_special + 1) if ids[at : at + len(plain)] == plain]
        if not begins or num_special >= limit:
            return ids
        end = begins[0] + len(plain)
        return [*ids[: begins[0]], *plain[: limit - num_special], *ids[end:]]

    def _chats(self, request: PoolingRequest) -> tuple[list[list[int]], Sequence[PoolingParams]]:
        chats, choices = request.messages or [], request.choices or []
        if len(chats) != len(choices):
            raise InvalidRequestError(f"choices is {len(choices)} lists; allowed: one for each of the messages")
        if not self._model.generates:
            raise InvalidRequestError("messages: this model generates no token; allowed: others")
        suffixes = request.suffixes or [""] * len(chats)
        if len(suffixes) != len(chats):
            raise InvalidRequestError(f"suffixes is {len(suffixes)} texts; allowed: one for each of the messages")
        rendered: dict[bytes, str] = {}  # prompts of one question share a chat
        prompts = []
        for chat, suffix in zip(chats, suffixes, strict=True):
            key = msgspec.json.encode(chat)
            if key not in rendered:
                rendered[key] = self._tokenizer.render(chat, **request.template)
            prompts.append(self._tokenizer.encode(rendered[key] + suffix, add_special_tokens=False))
        poolings = [
            PoolingParams(kind="token_logprobs", token_ids=tuple(self._tokenizer.first_token(word) for word in words))
            for words in choices
        ]
        for pooling in poolings:
            pooling.validate(self._model.hidden_size, self._model.vocab_size)
        return prompts, poolings

    def _limit(self, most: int | None) -> int | None:
        """Of a prompt's tokens, where longer ones are to be truncated. -1: the model's own."""
        if most is not None and most < 1 and most != -1:
            raise InvalidRequestError(f"truncate_prompt_tokens is {most}; allowed: 1 or more, or -1")
        return self._max_seq_len - 1 if most == -1 else most

    def _fitted(self, name: str, prompts: list[list[int]], limit: int | None) -> list[list[int]]:
        """Cut to `limit`. Raises InvalidRequestError for prompts that are too long."""
        if limit is not None:
            prompts = [prompt[:limit] for prompt in prompts]
        for ids in prompts:
            check_prompt(name, ids, vocab_size=self._model.vocab_size, max_seq_len=self._max_seq_len)
        if (total := sum(map(len, prompts))) > MAX_TOKENS:
            raise InvalidRequestError(f"{name} is {total} tokens together; allowed: at most {MAX_TOKENS}")
        return prompts

    def _cut(self, text: str, most: int | None) -> str:
        if most is None or len(ids := self._tokenizer.encode(text, add_special_tokens=False)) <= most:
            return text
        return self._tokenizer.decode(ids[:most])

    def _bounded(self, name: str, text: str, *, cut: bool = False) -> str:
        """The text, which is not tokenized if it is far too long: `cut`, or InvalidRequestError."""
        limit = max(_LEAST_TEXT_BYTES, 64 * self._max_seq_len)
        if len(text) > limit and not cut:
            raise InvalidRequestError(
                f"{name} has a text of {len(text)} characters; this model cannot take so long a prompt: prompt is too "
                f"long, this model's maximum context length is {self._max_seq_len} tokens"
            )
        return text[:limit]


def _decoded(name: str, text: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidRequestError(f"{name} is {shown(text)}; allowed: a JSON object ({error})") from None


def _converted(name: str, values: dict[str, Any]) -> PoolingRequest:
    try:
        return msgspec.convert(values, PoolingRequest)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"{name} is not valid: {error}") from None
