"""/v1/responses: create, store, retrieve, continue, cancel and delete."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from minisgl_backend.openai.answers import Answer, Header, Source
from minisgl_backend.openai.context import context_of, request_id_of
from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.errors import ApiError, ClientLeft, invalid
from minisgl_backend.openai.paging import check_order, page_behind
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.responses import WORDS, ResponsesRequest
from minisgl_backend.openai.response_events import KeptEvents
from minisgl_backend.openai.response_store import ResponseStore, StoredResponse
from minisgl_backend.openai.responses import ResponseAnswer, begun_response
from minisgl_backend.openai.storage import storage_error
from minisgl_backend.openai.triton import Generation, RequestContext

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25  # interval at which a background response checks whether it was cancelled
_REFUSAL_SECONDS = 2.0  # within which a server says that it does not take a request
_OFF = "this server keeps no responses (--response-store-bytes 0)"
_MAX_LISTED = 100


class Responses:
    """The responses of one worker."""

    def __init__(self, endpoint: Endpoint, store: ResponseStore | None) -> None:
        """`store`: None if no responses are kept."""
        self._endpoint = endpoint
        self._store = store
        self._running: dict[str, Generation] = {}  # in the background of this worker, by the response's id

    async def create(self, request: Request, body: ResponsesRequest) -> Response:
        body.check()
        context = context_of(request, body)
        store = self._store if body.store is not False else None
        if body.background and store is None:
            raise invalid("background", f"background is true; {_OFF if self._store is None else 'allowed: with store'}")
        await self._resolve_references(body)
        earlier = await self._earlier(body)
        items = [*earlier, *map(_named, body.items)]
        # Not the request's id, which the client may have chosen: it could then find or overwrite another client's
        # response.
        header = Header(f"resp_{uuid.uuid4().hex}", int(time.time()), body.model or "")
        with _renamed_errors():
            chat = body.as_chat(earlier)
            chat.check()
            self._endpoint.note_left_out(body.callable_tools.left_out)
        names = {**WORDS, **{ours: WORDS.get(theirs, theirs) for ours, theirs in chat.names().items()}}
        if body.background and store is not None:
            kept, endpoint = Kept(store, items), self._endpoint

            async def begin() -> dict[str, Any]:
                resolve = endpoint.model.resolve if body.stream else endpoint.admit
                named = replace(header, model=await resolve(body.model))
                with _renamed_errors():
                    return await self._begin(kept, body, chat, context, names, named)

            if body.stream:
                return await self._stream(request, KeptEvents(store, header.id), begin)
            return json_response(await begin())
        keep = None if store is None else Kept(store, items).keep

        async def start() -> tuple[Answer, Sequence[Source]]:
            named = replace(header, model=await self._endpoint.model.resolve(body.model))
            with _renamed_errors():
                generation, parsers = await self._endpoint.start_chat(chat, context, names, figures=True)
            return ResponseAnswer(body, generation, named, parsers[0] if parsers else None, keep), [generation]

        unstarted = ResponseAnswer(body, Generation(None, 0, names), header, None, keep)
        return await self._endpoint.respond(request, start, unstarted, stream=bool(body.stream), context=context)

    async def find(self, response_id: str) -> StoredResponse:
        """Raises ApiError if it is not kept."""
        found = None if self._store is None else await self._store.find(response_id)
        if found is None:
            reason = f"; {_OFF}" if self._store is None else ""
            message = f"there is no response with the id {response_id[:100]!r} here{reason}"
            raise ApiError(404, message, param="response_id")
        return found

    async def find_events(self, request: Request, response_id: str, after: int) -> Response:
        """A stream of the events behind number `after`."""
        await self.find(response_id)
        assert self._store is not None
        if not (await self._store.events(response_id, 0))[0]:
            allowed = "allowed: with a response that was made with background and stream"
            raise invalid("stream", f"stream is true, and no events of {response_id[:100]!r} are kept; {allowed}")
        return await self._stream(request, KeptEvents(self._store, response_id, after))

    async def _stream(
        self, request: Request, events: KeptEvents, begin: Callable[[], Awaitable[Any]] | None = None
    ) -> Response:
        """`begin`: what the events need first."""

        async def start() -> tuple[Answer, Sequence[Source]]:
            if begin is not None:
                await begin()
            return events, [events]

        context = RequestContext(request_id_of(request))
        return await self._endpoint.respond(request, start, events, stream=True, context=context)

    async def cancel(self, response_id: str) -> dict[str, Any]:
        found = await self.find(response_id)
        if not found.response["background"]:
            raise invalid("response_id", f"response_id is {response_id!r}; allowed: a response with background=true")
        assert self._store is not None
        if found.response["status"] != "in_progress":
            return found.response
        await self._store.cancel(response_id)
        if response_id in self._running:  # another worker looks for it by itself
            self._running[response_id].cancel()
        return {**found.response, "status": "cancelled"}

    async def delete(self, response_id: str) -> dict[str, Any]:
        await self.find(response_id)
        assert self._store is not None
        await self._store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def _earlier(self, body: ResponsesRequest) -> list[dict[str, Any]]:
        """The items of the conversation to continue."""
        name, previous = "previous_response_id", body.previous_response_id
        if not previous:
            return []
        if self._store is None:
            raise invalid(name, f"{name} is given; {_OFF}: send the whole conversation as input")
        found = await self._store.find(previous)
        if found is None:
            message = f"{name} is {previous[:100]!r}, which is not kept here, or not any more"
            raise invalid(name, message, "previous_response_not_found")
        if found.response["status"] not in ("completed", "incomplete"):
            status = found.response["status"]
            raise invalid(name, f"{name} is {previous!r}, which is {status}; allowed: a response that has ended")
        return found.conversation

    async def _resolve_references(self, body: ResponsesRequest) -> None:
        """Puts the kept items in place of references to them, as AI SDK sends them for all of the model's turns."""
        ids = body.references
        if not ids:
            return
        found = {} if self._store is None else await self._store.find_items(list(ids.values()))
        for number, item_id in ids.items():
            if item_id not in found:
                off = f"; {_OFF}" if self._store is None else ", as those of a response with store=false"
                message = f"input[{number}].id is {item_id[:100]!r}: an item that is not found here{off}"
                raise invalid("input", message)
        body.resolve({number: found[item_id] for number, item_id in ids.items()})

    async def _begin(
        self,
        kept: Kept,
        body: ResponsesRequest,
        chat: ChatRequest,
        context: RequestContext,
        names: Mapping[str, str],
        header: Header,
    ) -> dict[str, Any]:
        """Starts a background response. Raises ApiError if it cannot be kept, before it is computed."""
        begun = begun_response(body, header, is_kept=True)
        await kept.begin(begun)
        generation = None
        try:
            generation, parsers = await self._endpoint.start_chat(chat, context, names, figures=True)
            await generation.begin(_REFUSAL_SECONDS)
            answer = ResponseAnswer(body, generation, header, parsers[0] if parsers else None, kept.end)
            if body.stream:
                await kept.add_events(header.id, answer.first_events())
        except BaseException:
            if generation is not None:
                generation.cancel()
            with contextlib.suppress(sqlite3.Error):
                await kept.store.delete(header.id)
            await kept.store.note_ended(header.id)
            raise
        self._endpoint.start_task(self._compute(kept, answer, generation, header.id, stream=bool(body.stream)))
        return begun

    async def _compute(
        self, kept: Kept, answer: ResponseAnswer, generation: Generation, response_id: str, *, stream: bool
    ) -> None:
        """Computes a background response and keeps it when it has ended, in whatever way. `stream`: its events, too."""
        watch = asyncio.get_running_loop().create_task(self._watch(kept.store, generation, response_id))
        ended: dict[str, Any] | None = None
        self._running[response_id] = generation
        try:
            if stream:
                await kept.keep_events(response_id, answer)
            else:
                await answer.whole()
        except ClientLeft:
            ended = answer.response("cancelled")
        except ApiError as error:
            ended = answer.failed(error)
        except Exception as error:
            log.exception("response %s could not be computed", response_id)
            ended = answer.failed(ApiError(500, f"the response could not be computed ({type(error).__name__})"))
        finally:
            watch.cancel()
            del self._running[response_id]
            if ended is not None:
                await kept.end(ended)
                if stream:
                    await kept.add_events(response_id, answer.last_events(ended))
            await kept.store.note_ended(response_id)

    @staticmethod
    async def _watch(store: ResponseStore, generation: Generation, response_id: str) -> None:
        while True:
            try:
                if await store.is_cancelled(response_id):
                    break
            except sqlite3.Error as error:
                log.warning("response %s: whether it is cancelled cannot be read: %s", response_id, error)
            await asyncio.sleep(_LOOK_SECONDS)
        generation.cancel()


class Kept:
    """One response in the store, with the conversation up to it."""

    def __init__(self, store: ResponseStore, items: list[dict[str, Any]]) -> None:
        self.store = store
        self._items = items
        self._num_events = 0

    async def begin(self, response: dict[str, Any]) -> None:
        """For a background response, before it is computed. Raises ApiError if it cannot be kept."""
        try:
            if not await self.store.keep(response, self._items, running=True):
                message = (
                    "the conversation is larger than all that is kept (--response-store-bytes); background needs it"
                )
                raise ApiError(413, message, param="input", code="storage_full")
        except (sqlite3.Error, OSError) as error:
            log.error("response %s cannot be kept: %s", response["id"], error)
            raise storage_error("the response cannot be kept", error) from None

    async def keep(self, response: dict[str, Any], *, again: bool = False) -> bool:
        """False if it cannot be kept, which is logged."""
        try:
            if await self.store.keep(response, self._items, again=again):
                return True
            log.warning("response %s is larger than all that is kept (--response-store-bytes)", response["id"])
        except sqlite3.Error as error:
            log.error("response %s cannot be kept: %s", response["id"], error)
        return False

    async def keep_events(self, response_id: str, answer: ResponseAnswer) -> None:
        """Computes the answer, and keeps its events as they come. Raises ApiError, ClientLeft."""
        async for events in answer.single_events():
            await self.add_events(response_id, events)

    async def add_events(self, response_id: str, events: Sequence[bytes]) -> None:
        """Keeps further events. What cannot be kept is logged: whoever reads them is told how the response ends."""
        try:
            await self.store.add_events(response_id, self._num_events, events)
        except sqlite3.Error as error:
            log.error("events of response %s cannot be kept: %s", response_id, error)
        self._num_events += len(events)

    async def end(self, response: dict[str, Any]) -> bool:
        """For a background response that has ended. If it cannot be kept, clients see it as failed."""
        if await self.keep(response, again=True):
            return True
        error = {"code": "server_error", "message": "the response was computed, and could not be kept"}
        await self.keep({**response, "status": "failed", "error": error, "output": []}, again=True)
        return False


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    store, settings = None, endpoint.settings
    if settings.response_store_bytes and settings.state_folder:
        store = ResponseStore(Path(settings.state_folder, "responses.sqlite"), settings.response_store_bytes)
    responses = Responses(endpoint, store)

    @app.post("/v1/responses")
    async def create(request: Request, body: ResponsesRequest) -> Response:
        return await responses.create(request, body)

    @app.get("/v1/responses/{response_id}")
    async def find(
        request: Request, response_id: str, stream: bool = False, starting_after: int | None = None
    ) -> Response:
        if stream:
            return await responses.find_events(request, response_id, -1 if starting_after is None else starting_after)
        if starting_after is not None:
            raise invalid("starting_after", "starting_after is given; allowed: only with stream=true")
        return json_response((await responses.find(response_id)).response)

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, limit: int = 20, order: str = "desc", after: str = "") -> Response:
        if not 1 <= limit <= _MAX_LISTED:
            raise invalid("limit", f"limit is {limit}; allowed: 1 to {_MAX_LISTED}")
        check_order(order)
        found = (await responses.find(response_id)).items
        return json_response(page_behind(found if order == "asc" else found[::-1], after, limit))

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        return json_response(await responses.cancel(response_id))

    @app.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> Response:
        return json_response(await responses.delete(response_id))


def _named(item: dict[str, Any]) -> dict[str, Any]:
    """An item of the input with an id, by which later requests may refer to it."""
    return item if item.get("id") else {**item, "id": f"item_{uuid.uuid4().hex}"}


@contextlib.contextmanager
def _renamed_errors() -> Iterator[None]:
    """Errors name the fields as this API does."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(WORDS) from None
