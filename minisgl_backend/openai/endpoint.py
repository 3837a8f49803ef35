"""What the routes of one worker share: its connection to the server, and how requests are admitted and answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.host.options.endpoint import BATCHES, FILES, EndpointSettings
from minisgl_backend.images.parts import Source, asked_of_all
from minisgl_backend.openai.answers import PendingAnswer, Start, StreamSigns
from minisgl_backend.openai.batches.batches import BatchStore
from minisgl_backend.openai.batches.files import FileStore
from minisgl_backend.openai.error_answers import CLIENT_CLOSED_REQUEST
from minisgl_backend.openai.errors import ApiError, ClientLeft, invalid
from minisgl_backend.openai.image_sources import ImageSources
from minisgl_backend.openai.leaving import ClientWatch
from minisgl_backend.openai.log_once import LogOnce
from minisgl_backend.openai.message import MessageParser, message_parsers
from minisgl_backend.openai.metrics import ServerMetrics
from minisgl_backend.openai.model import ServedModel
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.messages import Message
from minisgl_backend.openai.sse import SILENT_SECONDS, EventStream
from minisgl_backend.openai.tracing import RequestTrace
from minisgl_backend.openai.triton import Generation, Prompt, RequestContext, TritonServer
from minisgl_backend.openai.vectors import VectorCall, Vectors

log = logging.getLogger(__name__)

Work = Coroutine[Any, Any, None]


class Endpoint:
    """For one event loop, from `open` to `close`."""

    def __init__(self, settings: EndpointSettings) -> None:
        self.settings = settings
        self.files = FileStore(Path(settings.files_folder, FILES), settings.max_files_bytes)
        self.batches = BatchStore(Path(settings.files_folder, BATCHES))
        self.images = ImageSources(self.files if settings.max_files_bytes else None, settings.media_domains)
        self._num_requests = 0
        self._background: list[Callable[[], Work]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._left_out = LogOnce()  # types of tools

    def run_while_open(self, work: Callable[[], Work]) -> None:
        """Adds work that begins with `open`; before that."""
        self._background.append(work)

    async def open(self) -> None:
        """To be called in the event loop that serves."""
        self.triton = TritonServer(self.settings.grpc_address, secure=self.settings.grpc_secure)
        self.model = ServedModel(self.triton, self.settings)
        self.metrics = ServerMetrics(self.settings.metrics_address)
        for work in self._background:
            self.start_task(work(), is_request=False)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.triton.close()

    def start_task(self, work: Work, *, is_request: bool = True) -> None:
        """Runs until the endpoint is closed. `is_request`: it counts as a request in flight."""
        self._num_requests += is_request

        def ended(task: asyncio.Task[None]) -> None:
            self._num_requests -= is_request
            self._tasks.discard(task)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def admit(self, model: str | None) -> str:
        """The model name for the answer. Raises ApiError if there is no room, or no such model."""
        self._check_room()
        return await self.model.resolve(model)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """For a request of one short answer, which counts as one in flight. Raises ApiError if there is no room."""
        self._check_room()
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    def _check_room(self) -> None:
        if self._num_requests >= self.settings.max_requests:
            message = f"{self._num_requests} requests are in flight, all that this server takes; try again later"
            raise ApiError(429, message, code="queue_full")

    async def chat_prompt(
        self, body: Templated, messages: Sequence[Message], trace: RequestTrace | None = None
    ) -> Prompt:
        """Raises ApiError for messages that no template takes, and for images that cannot be read."""
        prompt, began = chat_prompt(body, messages), time.time_ns()
        if not prompt.images:
            return prompt
        images = await self.images.load(prompt.images, (await self.model.info()).max_images)
        if trace is not None:
            trace.note_images(began, time.time_ns())
        return replace(prompt, images=images)

    async def start_chat(
        self, body: ChatRequest, context: RequestContext, names: Mapping[str, str], *, figures: bool
    ) -> tuple[Generation, Sequence[MessageParser] | None]:
        """Starts a chat. `names`: the client's names of fields that the server knows by another name."""
        prompt = await self.chat_prompt(body, body.messages, context.trace)
        functions = {one.name: one.schema_of_arguments for one in body.callable_functions}
        answer_format = await self.model.answer_format(
            functions or None,
            reasoning=(body.separates_reasoning or body.reasoning_hides_calls)
            and not (body.must_call and body.thinking_budget is None),
            apart=body.separates_reasoning,
            is_guided=body.is_guided and body.thinking_budget is None,
            forced=body.must_call,
        )
        sampling, tail = {**body.sampling(), **await self.model.options(body)}, ""
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
            outputs = ["input_ids", "prompt_tail"]
            found = await self.triton.tokenize(prompt, outputs, names, body.add_special_tokens)
            tail = found["prompt_tail"][0].decode("utf-8", "replace")
            if not prompt.images:  # whose places are those of messages
                prompt = Prompt(token_ids=found["input_ids"])
                names = {"prompt_token_ids": names.get("messages", "messages"), **names}
        parsers = message_parsers(body, answer_format, tail)
        return self.triton.start(prompt, sampling, context, names, figures=figures), parsers

    def note_left_out(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            if self._left_out.is_new(kind):
                log.warning("tools of type %.60r are left out of requests: this server cannot run them", kind)

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
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            if not handed_over:
                watch.close()
                if not stream:
                    self._num_requests -= 1

    async def vectors(
        self, request: Request, fields: Mapping[str, Any], context: RequestContext, names: Mapping[str, str]
    ) -> Vectors:
        """Raises ApiError, ClientLeft. `fields`: see VectorCall."""
        call = VectorCall(self.triton, fields, context, names)
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


async def _first(events: AsyncIterator[bytes]) -> bytes:
    """Empty for a stream without any."""
    return await anext(events, b"")


class Templated(Protocol):
    """A request with arguments for the chat template."""

    mm_processor_kwargs: dict[str, Any] | None
    media_io_kwargs: dict[str, Any] | None

    def template_kwargs(self) -> dict[str, Any]:
        """Those other than the messages."""
        ...


def chat_prompt(body: Templated, messages: Sequence[Message]) -> Prompt:
    """Its images are not read yet. Raises ApiError for messages that no template takes."""
    images: list[Source] = []
    try:
        asked = asked_of_all(body.mm_processor_kwargs, body.media_io_kwargs)
    except InvalidRequestError as error:
        raise invalid(str(error).partition(" ")[0].partition(".")[0], str(error)) from None
    texts = [message.for_template(number, images, asked) for number, message in enumerate(messages)]
    return Prompt(messages=texts, template_kwargs=body.template_kwargs(), images=images)
