"""The endpoint's routes. What each does with a generation is in `chat`, `completions` and `responses`."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

import minisgl_backend
from minisgl_backend.host.openai_endpoint import EndpointSettings
from minisgl_backend.openai.answers import Answer, Header
from minisgl_backend.openai.chat import ChatAnswer
from minisgl_backend.openai.completions import CompletionAnswer, Echo
from minisgl_backend.openai.errors import ApiError, ClientLeft, invalid
from minisgl_backend.openai.leaving import ClientWatch
from minisgl_backend.openai.limits import TOO_LARGE, ApiKeys, BodyLimit
from minisgl_backend.openai.message import MessageParser, message_parsers
from minisgl_backend.openai.metrics import ServerMetrics
from minisgl_backend.openai.model import ServedModel
from minisgl_backend.openai.page import add_page
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.completions import CompletionRequest
from minisgl_backend.openai.requests.messages import Message
from minisgl_backend.openai.requests.responses import WORDS, ResponsesRequest
from minisgl_backend.openai.requests.tokenize import DetokenizeRequest, TokenizeRequest
from minisgl_backend.openai.responses import ResponseAnswer
from minisgl_backend.openai.sse import EventStream, encode
from minisgl_backend.openai.triton import Generation, Prompt, RequestContext, TritonServer
from minisgl_backend.openai.validation import from_validation

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACE_HEADERS = ("traceparent", "tracestate")
_LEFT = 499  # nginx's status for a client that has left; nobody reads it


class Endpoint:
    """What the routes share: one worker's connection to the server and its settings."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._num_requests = 0

    async def open(self) -> None:
        """To be called in the event loop that serves."""
        self.triton = TritonServer(self._settings.grpc_address, secure=self._settings.grpc_secure)
        self.model = ServedModel(self.triton, self._settings)
        self.metrics = ServerMetrics(self._settings.metrics_address)

    async def close(self) -> None:
        await self.triton.close()

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        body.check()
        context = _context(request)
        name = await self._admit(body.model)
        generation, parsers = await self._start_chat(body, context, body.names(), figures=body.wants_figures)
        header = Header(f"chatcmpl-{context.request_id}", int(time.time()), name)
        answer = ChatAnswer(body, generation, header, parsers)
        return await self._respond(request, answer, [generation], stream=bool(body.stream), context=context)

    async def respond(self, request: Request, body: ResponsesRequest) -> Response:
        """A chat in other words, which errors are told in."""
        body.check()
        context = _context(request)
        name = await self._admit(body.model)
        try:
            chat = body.as_chat()
            chat.check()
            names = {**WORDS, **{ours: WORDS.get(theirs, theirs) for ours, theirs in chat.names().items()}}
            generation, parsers = await self._start_chat(chat, context, names, figures=True)
        except ApiError as error:
            raise error.renamed(WORDS) from None
        header = Header(f"resp_{context.request_id}", int(time.time()), name)
        answer = ResponseAnswer(body, generation, header, parsers[0] if parsers else None)
        return await self._respond(request, answer, [generation], stream=bool(body.stream), context=context)

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        body.check()
        context = _context(request)
        name = await self._admit(body.model)
        prompts = [
            Prompt(text=prompt) if isinstance(prompt, str) else Prompt(token_ids=prompt) for prompt in body.prompts
        ]
        echoes = [await self._echo(prompt, body) for prompt in prompts] if body.echo else None
        sampling, names = body.sampling(), body.names()
        figures = body.wants_figures
        generations = [self.triton.start(prompt, sampling, context, names, figures=figures) for prompt in prompts]
        answer = CompletionAnswer(
            body, generations, Header(f"cmpl-{context.request_id}", int(time.time()), name), echoes
        )
        return await self._respond(request, answer, generations, stream=bool(body.stream), context=context)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """vLLM's answer: count, max_model_len, tokens, token_strs."""
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
        wanted = ["input_ids", *(["token_texts"] if body.return_token_strs else [])]
        found = await self.triton.tokenize(prompt, wanted, {"text_input": "prompt"}, special)
        texts = [text.decode("utf-8", "replace") for text in found["token_texts"]] if body.return_token_strs else None
        info = await self.model.info()
        tokens = found["input_ids"]
        return {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens, "token_strs": texts}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """vLLM's answer: the text, special tokens included."""
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

    async def _admit(self, model: str | None) -> str:
        """The name that the answer carries. Raises ApiError where there is no room, or no such model."""
        if self._num_requests >= self._settings.max_requests:
            message = f"{self._num_requests} requests are in flight, all that this server takes; try again later"
            raise ApiError(429, message, code="queue_full")
        return await self.model.resolve(model)

    async def _start_chat(
        self, body: ChatRequest, context: RequestContext, names: Mapping[str, str], *, figures: bool
    ) -> tuple[Generation, Sequence[MessageParser] | None]:
        """Sends a chat. `names`: what the client calls the fields that the server knows by another name."""
        messages = _template_messages(body.messages)
        new_reasoning = new_tools = None
        if body.wants_thoughts_apart:
            new_reasoning = await self.model.reasoning_parser(body.switches(), is_guided=body.is_guided)
        if body.choice == "auto":
            functions = [tool.function for tool in body.tools or ()]
            new_tools = await self.model.tool_parser({one.name: one.schema_of_arguments for one in functions})
        parsers = message_parsers(body, new_reasoning, new_tools)
        prompt = Prompt(messages=messages, template_kwargs=body.template_kwargs())
        return self.triton.start(prompt, body.sampling(), context, names, figures=figures), parsers

    async def _echo(self, prompt: Prompt, body: CompletionRequest) -> Echo:
        if prompt.text is not None and body.logprobs is None:
            return Echo(prompt.text, "")
        special = {} if body.add_special_tokens is None else {"add_special_tokens": body.add_special_tokens}
        found = await self.triton.tokenize(prompt, ["prompt_text", "token_texts"], body.names(), special)
        text = prompt.text if prompt.text is not None else found["prompt_text"][0].decode("utf-8", "replace")
        return Echo(text, found["token_texts"][0].decode("utf-8", "replace"))

    async def _respond(
        self,
        request: Request,
        answer: Answer,
        generations: Sequence[Generation],
        *,
        stream: bool,
        context: RequestContext,
    ) -> Response:
        """Waits for the first part of a stream, so that what is wrong with a request is told by its status."""

        def left() -> None:
            for generation in generations:
                generation.cancel()

        self._num_requests += 1
        watch = ClientWatch(request.receive, left)
        headers = {"x-request-id": context.request_id}
        handed_over = False
        try:
            if not stream:
                return Response(await answer.whole(), media_type="application/json", headers=headers)
            lines = self._counted(answer.lines())
            first = await anext(lines)
            handed_over = True
            return EventStream(first, lines, answer.error_line, watch, headers)
        except ClientLeft:
            return Response(status_code=_LEFT)
        finally:
            if not handed_over:
                watch.close()
                if not stream:
                    self._num_requests -= 1

    async def _counted(self, lines: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        try:
            async for line in lines:
                yield line
        finally:
            self._num_requests -= 1


def create_app(settings: EndpointSettings) -> FastAPI:
    """The ASGI application of one worker."""
    endpoint = Endpoint(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await endpoint.open()
        yield
        await endpoint.close()

    app = FastAPI(
        title="minisgl-backend",
        version=minisgl_backend.__version__,
        description="An OpenAI-compatible endpoint before Triton Inference Server.",
        lifespan=lifespan,
        # Both would fetch scripts from other hosts; /openapi.json is there for whoever wants them.
        docs_url=None,
        redoc_url=None,
    )
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_wrong_body)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RecursionError, _answer_nested_body)
    app.add_exception_handler(Exception, _answer_unforeseen)
    # The last one added is the first one asked.
    app.add_middleware(BodyLimit, most_bytes=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    _add_routes(app, endpoint)
    return app


def _add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await endpoint.chat(request, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await endpoint.complete(request, body)

    @app.post("/v1/responses")
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        return await endpoint.respond(request, body)

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


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


def _context(request: Request) -> RequestContext:
    traces = ((name, request.headers.get(name)) for name in _TRACE_HEADERS)
    # gRPC metadata is printable ASCII; anything else would end the call here.
    return RequestContext(
        _request_id(request), tuple((n, v) for n, v in traces if v and v.isascii() and v.isprintable())
    )


def _request_id(request: Request) -> str:
    """The client's own, where it may be one, else one that is made for the request."""
    if not hasattr(request.state, "request_id"):
        given = request.headers.get("x-request-id", "")
        request.state.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return str(request.state.request_id)


def _template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.for_template(place) for place, message in enumerate(messages)]


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {**error.headers, "x-request-id": _request_id(request)}
    return Response(encode(error.body), error.status, headers, media_type="application/json")


async def _answer_unforeseen(request: Request, error: Exception) -> Response:
    """A fault of this code, which the log shows."""
    return await _answer_error(request, ApiError(500, f"the request could not be answered ({type(error).__name__})"))


async def _answer_wrong_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _answer_error(request, from_validation(error.errors()))


async def _answer_nested_body(request: Request, error: Exception) -> Response:
    """JSON that was read a few levels short of the limit cannot be written again, from deeper in the code."""
    log.warning("a body was nested too deeply, or the code calls itself without an end", exc_info=error)
    return await _answer_error(request, invalid("body", "the body is nested too deeply; allowed: fewer levels"))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.url.path} here; /openapi.json lists all paths"
    if error.status_code == 400:
        return await _answer_error(request, invalid("body", message))
    code = TOO_LARGE if error.status_code == 413 else None
    answer = await _answer_error(request, ApiError(error.status_code, message, code=code))
    answer.headers.update(error.headers or {})
    return answer
