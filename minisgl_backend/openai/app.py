"""The endpoint's routes. `chat`, `completions` and `responses` turn generations into answers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse
from starlette.responses import Response

import minisgl_backend
from minisgl_backend.host.openai_endpoint import BATCHES, FILES, EndpointSettings
from minisgl_backend.openai import (
    anthropic,
    batches,
    decisions,
    files,
    message_batches,
    pooling_routes,
    response_routes,
)
from minisgl_backend.openai.answers import Answer, Header, PendingAnswer, Start, StreamSigns
from minisgl_backend.openai.batch_runner import BatchRunner
from minisgl_backend.openai.browsers import BrowserGuard
from minisgl_backend.openai.chat import ChatAnswer
from minisgl_backend.openai.completions import CompletionAnswer, Echo
from minisgl_backend.openai.context import context_of
from minisgl_backend.openai.error_answers import LEFT, add_error_answers
from minisgl_backend.openai.errors import ApiError, ClientLeft
from minisgl_backend.openai.in_process import post
from minisgl_backend.openai.leaving import ClientWatch
from minisgl_backend.openai.limits import ApiKeys, BodyLimit
from minisgl_backend.openai.log_once import LogOnce
from minisgl_backend.openai.message import MessageParser, message_parsers
from minisgl_backend.openai.metrics import ServerMetrics
from minisgl_backend.openai.model import ServedModel
from minisgl_backend.openai.page import add_page
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.completions import CompletionRequest
from minisgl_backend.openai.requests.messages import Message
from minisgl_backend.openai.requests.tokenize import DetokenizeRequest, TokenizeRequest
from minisgl_backend.openai.sse import SILENT_SECONDS, EventStream, encode
from minisgl_backend.openai.tracing import TraceRequests, Tracing
from minisgl_backend.openai.triton import Generation, Prompt, RequestContext, TritonServer
from minisgl_backend.openai.unknown_fields import IgnoreUnknownFields
from minisgl_backend.openai.vectors import VectorCall, Vectors

log = logging.getLogger(__name__)

_LARGE_BODIES = dict.fromkeys((files.PATH, message_batches.PATH), files.MAX_FILE_BYTES)


class Endpoint:
    """What the routes share: one worker's connection to the server, and its settings."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._num_requests = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._left_out = LogOnce()  # types of tools

    async def open(self) -> None:
        """To be called in the event loop that serves."""
        self.triton = TritonServer(self._settings.grpc_address, secure=self._settings.grpc_secure)
        self.model = ServedModel(self.triton, self._settings)
        self.metrics = ServerMetrics(self._settings.metrics_address)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.triton.close()

    def start_task(self, work: Coroutine[Any, Any, None], *, is_request: bool = True) -> None:
        """Runs until the endpoint is closed. `is_request`: it counts as a request in flight."""
        self._num_requests += is_request

        def ended(task: asyncio.Task[None]) -> None:
            self._num_requests -= is_request
            self._tasks.discard(task)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        body.check()
        context = context_of(request, body)

        async def start() -> tuple[Answer, Sequence[Generation]]:
            name = await self.model.resolve(body.model)
            header = Header(f"chatcmpl-{context.request_id}", int(time.time()), name)
            generation, parsers = await self.start_chat(body, context, body.names(), figures=body.wants_figures)
            return ChatAnswer(body, generation, header, parsers), [generation]

        return await self.respond(request, start, ChatAnswer, stream=bool(body.stream), context=context)

    async def count_prompt_tokens(self, chat: ChatRequest, names: Mapping[str, str]) -> int:
        prompt = Prompt(messages=_template_messages(chat.messages), template_kwargs=chat.template_kwargs())
        return len((await self.triton.tokenize(prompt, ["input_ids"], names))["input_ids"])

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        body.check()
        context = context_of(request, body)
        prompts = [
            Prompt(text=prompt) if isinstance(prompt, str) else Prompt(token_ids=prompt) for prompt in body.prompts
        ]

        async def start() -> tuple[Answer, Sequence[Generation]]:
            name = await self.model.resolve(body.model)
            header = Header(f"cmpl-{context.request_id}", int(time.time()), name)
            echoes = [await self._echo(prompt, body) for prompt in prompts] if body.echo else None
            sampling, names = {**body.sampling(), **await self.model.thinking(body)}, body.names()
            figures = body.wants_figures
            generations = [self.triton.start(prompt, sampling, context, names, figures=figures) for prompt in prompts]
            return CompletionAnswer(body, generations, header, echoes), generations

        return await self.respond(request, start, CompletionAnswer, stream=bool(body.stream), context=context)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """vLLM's response: count, max_model_len, tokens, token_strs."""
        body.check()
        await self.model.resolve(body.model)
        if body.messages is not None:
            prompt = Prompt(messages=_template_messages(body.messages), template_kwargs=body.template_kwargs())
        elif not body.prompt:
            info = await self.model.info()
            return {"count": 0, "max_model_len": info.max_model_len, "tokens": [], "token_strs": None}
        else:
            prompt = Prompt(text=body.prompt)
        special = {} if body.add_special_tokens is None else {"add_special_tokens": body.add_special_tokens}
        outputs = ["input_ids", *(["token_texts"] if body.return_token_strs else [])]
        found = await self.triton.tokenize(prompt, outputs, {"text_input": "prompt"}, special)
        texts = [text.decode("utf-8", "replace") for text in found["token_texts"]] if body.return_token_strs else None
        info = await self.model.info()
        tokens = found["input_ids"]
        return {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens, "token_strs": texts}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """vLLM's response: the text, special tokens included."""
        await self.model.resolve(body.model)
        if not body.tokens:
            return {"prompt": ""}
        names = {"prompt_token_ids": "tokens"}
        found = await self.triton.tokenize(Prompt(token_ids=body.tokens), ["prompt_text"], names)
        return {"prompt": found["prompt_text"][0].decode("utf-8", "replace")}

    async def not_ready_reason(self) -> str | None:
        if not await self.triton.is_ready():
            return "the server is not ready"
        return "the engine is down" if await self.metrics.engine_is_down() else None

    async def admit(self, model: str | None) -> str:
        """The model name for the answer. Raises ApiError if there is no room, or no such model."""
        self._check_room()
        return await self.model.resolve(model)

    def _check_room(self) -> None:
        if self._num_requests >= self._settings.max_requests:
            message = f"{self._num_requests} requests are in flight, all that this server takes; try again later"
            raise ApiError(429, message, code="queue_full")

    async def start_chat(
        self, body: ChatRequest, context: RequestContext, names: Mapping[str, str], *, figures: bool
    ) -> tuple[Generation, Sequence[MessageParser] | None]:
        """Starts a chat. `names`: the client's names of fields that the server knows by another name."""
        prompt = Prompt(messages=_template_messages(body.messages), template_kwargs=body.template_kwargs())
        functions = {one.name: one.schema_of_arguments for one in body.callable_functions}
        answer_format = await self.model.answer_format(
            functions or None,
            thoughts=(body.wants_thoughts_apart or body.thoughts_hide_calls)
            and not (body.must_call and body.thinking_budget is None),
            apart=body.wants_thoughts_apart,
            is_guided=body.is_guided and body.thinking_budget is None,
            forced=body.must_call,
        )
        sampling, tail = {**body.sampling(), **await self.model.thinking(body)}, ""
        if answer_format.needs_special_tokens:
            sampling["skip_special_tokens"] = False
        if body.must_call:
            grammar = answer_format.forced_grammar(parallel=body.allows_several_calls)
        else:
            grammar = answer_format.grammar([one.name for one in body.callable_functions if one.strict])
        if grammar is not None and (body.must_call or not body.is_guided):
            sampling["guided_decoding"] = {"structural_tag": json.dumps(grammar)}
            names = {**names, "guided_decoding": "tools", "guided_decoding_guide": "tools"}
        if answer_format.depends_on_prompt:
            # Rendered and tokenized here and sent as tokens: the same work, and it shows how the prompt ends.
            special = {} if body.add_special_tokens is None else {"add_special_tokens": body.add_special_tokens}
            found = await self.triton.tokenize(prompt, ["input_ids", "prompt_tail"], names, special)
            prompt, tail = Prompt(token_ids=found["input_ids"]), found["prompt_tail"][0].decode("utf-8", "replace")
            names = {"prompt_token_ids": names.get("messages", "messages"), **names}
        parsers = message_parsers(body, answer_format, tail)
        return self.triton.start(prompt, sampling, context, names, figures=figures), parsers

    def note_left_out(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            if self._left_out.is_new(kind):
                log.warning("tools of type %.60r are left out of requests: this server cannot run them", kind)

    async def _echo(self, prompt: Prompt, body: CompletionRequest) -> Echo:
        if prompt.text is not None and body.logprobs is None:
            return Echo(prompt.text, "")
        special = {} if body.add_special_tokens is None else {"add_special_tokens": body.add_special_tokens}
        found = await self.triton.tokenize(prompt, ["prompt_text", "token_texts"], body.names(), special)
        text = prompt.text if prompt.text is not None else found["prompt_text"][0].decode("utf-8", "replace")
        return Echo(text, found["token_texts"][0].decode("utf-8", "replace"))

    async def respond(
        self,
        request: Request,
        start: Callable[[], Start],
        signs: StreamSigns,
        *,
        stream: bool,
        context: RequestContext,
    ) -> Response:
        """Waits for the first event of a stream, so that an invalid request gets an error status, but not for long.

        `start`: see PendingAnswer; `signs`: of a stream that has not started. Raises ApiError.
        """
        self._check_room()
        self._num_requests += 1
        pending = PendingAnswer(start())
        watch = ClientWatch(request.receive, pending.cancel)
        headers = {"x-request-id": context.request_id}
        handed_over = False
        try:
            if not stream:
                body = await (await pending.started()).whole()
                if context.trace is not None:
                    context.trace.note_answer(pending.generations)
                return Response(body, media_type="application/json", headers=headers)
            events = self._counted(pending, context)
            first = asyncio.ensure_future(_first(events))
            try:
                await asyncio.wait([first], timeout=SILENT_SECONDS)
            except asyncio.CancelledError:
                first.cancel()
                raise
            if first.done():
                first.result()
            handed_over = True
            return EventStream(pending, signs, first, events, watch, headers)
        except ClientLeft:
            return Response(status_code=LEFT)
        finally:
            if not handed_over:
                watch.close()
                if not stream:
                    self._num_requests -= 1

    async def vectors(
        self, request: Request, asked: Mapping[str, Any], context: RequestContext, names: Mapping[str, str]
    ) -> Vectors:
        """Raises ApiError, ClientLeft. `asked`: see VectorCall."""
        call = VectorCall(self.triton, asked, context, names)
        self._num_requests += 1
        watch = ClientWatch(request.receive, call.cancel)
        try:
            found = await call.result()
        finally:
            watch.close()
            self._num_requests -= 1
        if context.trace is not None:
            context.trace.note_input(sum(found.prompt_lengths), found.num_cached_tokens)
        return found

    async def _counted(self, pending: PendingAnswer, context: RequestContext) -> AsyncGenerator[bytes]:
        try:
            async for data in (await pending.started()).events():
                yield data
        finally:
            self._num_requests -= 1
            if context.trace is not None:
                context.trace.note_answer(pending.generations)


def create_app(settings: EndpointSettings) -> FastAPI:
    """The ASGI application of one worker."""
    endpoint = Endpoint(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await endpoint.open()
        if runner is not None:
            endpoint.start_task(runner.run(), is_request=False)
        yield
        await endpoint.close()
        if tracing is not None:
            tracing.close()

    tracing = Tracing(settings.otlp_endpoint) if settings.otlp_endpoint else None
    app = FastAPI(
        title="minisgl-backend",
        version=minisgl_backend.__version__,
        description="An OpenAI-compatible endpoint before Triton Inference Server.",
        lifespan=lifespan,
        # Both would load scripts from other hosts; /openapi.json is available instead.
        docs_url=None,
        redoc_url=None,
    )
    app.state.tenants = settings.tenants
    add_error_answers(app)
    # The last one added runs first.
    if settings.ignore_unknown_fields:
        app.add_middleware(IgnoreUnknownFields)
    app.add_middleware(BodyLimit, most_bytes=settings.max_body_bytes, by_path=_LARGE_BODIES)
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(
        BrowserGuard,
        host=settings.host,
        allowed_hosts=settings.allowed_hosts,
        allowed_origins=settings.allowed_origins,
    )
    if tracing is not None:
        app.add_middleware(TraceRequests, tracing=tracing)
    _add_routes(app, endpoint)
    anthropic.add_routes(app, endpoint)
    response_routes.add_routes(app, endpoint, settings)
    pooling_routes.add_routes(app, endpoint)
    decisions.add_routes(app, endpoint)
    runner = _add_batches(app, settings)
    return app


def _add_batches(app: FastAPI, settings: EndpointSettings) -> BatchRunner | None:
    """Adds the routes of files and batches. Returns the runner of batches; None if no files are kept."""
    if not settings.max_files_bytes or not settings.files_folder:
        return None
    folder = Path(settings.files_folder)
    store = files.FileStore(folder / FILES, settings.max_files_bytes)
    kept = batches.BatchStore(folder / BATCHES)
    files.add_routes(app, store)
    batches.add_routes(app, kept, store)
    message_batches.add_routes(app, message_batches.MessageBatches(kept, store, settings.max_body_bytes))
    return BatchRunner(kept, store, partial(post, app), settings.max_batch_requests, settings.max_body_bytes)


def _add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await endpoint.chat(request, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await endpoint.complete(request, body)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": await endpoint.model.cards()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        await endpoint.model.resolve(name)
        return _json(next(card for card in await endpoint.model.cards() if card["id"] == name))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        return _json(await endpoint.tokenize(body))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        return _json(await endpoint.detokenize(body))

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        info = await endpoint.model.info()
        length = {"model_max_length": info.max_model_len, "chat_template": info.chat_template or None}
        return _json({**info.tokenizer, **length})

    @app.get("/health")
    async def health() -> Response:
        reason = await endpoint.not_ready_reason()
        return _json({"ready": reason is None, "reason": reason or ""}, 200 if reason is None else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(await endpoint.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": minisgl_backend.__version__})

    add_page(app)


async def _first(events: AsyncIterator[bytes]) -> bytes:
    """Empty for a stream without any."""
    return await anext(events, b"")


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


def _template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.for_template(number) for number, message in enumerate(messages)]
