"""/v1/responses: a chat's answer as items, whole or as typed events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from minisgl_backend.openai.answers import Header, usage
from minisgl_backend.openai.encoding import encode
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.logprobs import HeldPositions, chat_logprobs, said
from minisgl_backend.openai.message import MessageParser, new_call_id
from minisgl_backend.openai.requests.responses import ResponsesRequest
from minisgl_backend.openai.sse import KEEP_ALIVE, named_event
from minisgl_backend.openai.triton import Delta, Generation
from minisgl_backend.parsers.parts import Part
from minisgl_backend.parsers.reasoning import CLOSE

Keep = Callable[[dict[str, Any]], Awaitable[bool]]  # False: it could not be kept
Event = dict[str, Any]  # without its sequence number, which is added when it is sent


class OutputItems:
    """The growing items of one answer, and their events."""

    def __init__(self, namespaces: Mapping[str, tuple[str, str]] | None = None) -> None:
        """`namespaces`: the model's name of a function -> the client's namespace and name."""
        self._namespaces = namespaces or {}
        self.items: list[dict[str, Any]] = []
        self._open = False  # the last item goes on

    def add(self, part: Part, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Adds the next part of the answer. `logprobs`: of the tokens in a content part."""
        if part.kind == "broken":
            return self.close("incomplete")
        if part.kind == "call":
            namespace, name = self._namespaces.get(part.text, (None, part.text))
            call = {"name": name, "arguments": "", "call_id": part.id or new_call_id()}
            call |= {} if namespace is None else {"namespace": namespace}
            return self.close() + self._begin({"type": "function_call", **call}, "fc")
        if part.kind == "arguments":
            self.items[-1]["arguments"] += part.text
            return [self._event("response.function_call_arguments.delta", delta=part.text)]
        kind, events = ("reasoning" if part.kind == "reasoning" else "message"), []
        if not self._open or self.items[-1]["type"] != kind:
            events = self.close() + (self.begin_message() if kind == "message" else self._begin_reasoning())
        (content,) = self.items[-1]["content"]
        content["text"] += part.text
        if kind == "reasoning":
            events.append(self._event("response.reasoning_text.delta", content_index=0, delta=part.text))
        else:
            content["logprobs"] += logprobs
            delta = {"content_index": 0, "delta": part.text, "logprobs": list(logprobs)}
            events.append(self._event("response.output_text.delta", **delta))
        return events

    def begin_message(self) -> list[Event]:
        events = self._begin({"type": "message", "role": "assistant", "content": []}, "msg")
        return events + self._begin_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def close(self, status: str = "completed") -> list[Event]:
        """The last item is complete."""
        if not self._open:
            return []
        self._open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event("response.function_call_arguments.done", **done)]
        else:
            (content,) = item["content"]
            told = {"content_index": 0, "text": content["text"]}
            if item["type"] == "message":
                events = [self._event("response.output_text.done", **told, logprobs=content["logprobs"])]
            else:
                events = [self._event("response.reasoning_text.done", **told)]
            events.append(self._event("response.content_part.done", content_index=0, part=content))
        return [*events, self._item_event("response.output_item.done")]

    def _begin_reasoning(self) -> list[Event]:
        events = self._begin({"type": "reasoning", "summary": [], "content": []}, "rs")
        return events + self._begin_part({"type": "reasoning_text", "text": ""})

    def _begin(self, item: dict[str, Any], prefix: str) -> list[Event]:
        self._open = True
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        return [self._item_event("response.output_item.added")]

    def _begin_part(self, part: dict[str, Any]) -> list[Event]:
        self.items[-1]["content"].append(part)
        return [self._event("response.content_part.added", content_index=0, part=part)]

    def _item_event(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, "item": _copied(self.items[-1])}

    def _event(self, kind: str, **values: Any) -> Event:
        position = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": kind, **position, **{name: _copied(value) for name, value in values.items()}}


class ResponseAnswer:
    """One request in progress."""

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        request: ResponsesRequest,
        generation: Generation,
        header: Header,
        parser: MessageParser | None,
        keep: Keep | None = None,
    ) -> None:
        """`parser`: None if the text is the content unchanged. `keep` stores the finished response before the client
        gets it; None if it is not kept."""
        self._keep = keep
        self._request = request
        self._generation = generation
        self._header = header
        self._parser = parser or MessageParser()
        self._output = OutputItems(request.callable_tools.namespaces)
        self._held = HeldPositions()
        self._has_content = False
        self._number = 0  # of the next event

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        async for events in self.single_events():
            yield b"".join(events)

    async def single_events(self) -> AsyncIterator[list[bytes]]:
        """The same, one by one; those of one step together."""
        async for events, status in self._progress():
            if status is not None:
                events.append({"type": f"response.{status}", "response": await self._kept(status)})
            if encoded := self._encode(events):
                yield encoded

    def first_events(self) -> list[bytes]:
        """The two that need nothing of the answer; `single_events` then goes on behind them."""
        return self._encode(())

    async def whole(self) -> bytes:
        """The whole answer."""
        self._parser.tell_at_end()
        last = "completed"
        async for _, status in self._progress():
            last = status or last
        return encode(await self._kept(last))

    async def _kept(self, status: str) -> dict[str, Any]:
        response = self.response(status)
        if self._keep is not None and not await self._keep(response):
            response["store"] = False
        return response

    def error_event(self, error: ApiError) -> bytes:
        return b"".join(self.last_events(self.failed(error)))

    def last_events(self, response: dict[str, Any]) -> list[bytes]:
        """Those of a response that ended otherwise than by itself."""
        return self._encode([{"type": f"response.{response['status']}", "response": response}])

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The response, which failed."""
        self._output.close("incomplete")
        return self.response("failed", error)

    async def _progress(self) -> AsyncIterator[tuple[list[Event], str | None]]:
        """(new events, the final status: None while the response goes on)."""
        while (delta := await self._generation.next()) is not None:
            events = self._take(delta)
            if delta.reason is None:
                yield events, None
                continue
            status = "incomplete" if delta.reason == "length" else "completed"
            if not self._output.items:
                events += self._output.begin_message()
            yield events + self._output.close(status), status
        await self._generation.drain()

    def _take(self, delta: Delta) -> list[Event]:
        self._held.add(delta.logprobs if self._request.include_stop_str_in_output else said(delta))
        events: list[Event] = []
        behind_call = False
        parts = self._parser.feed(delta)
        for number, part in enumerate(parts):
            told: list[dict[str, Any]] = []
            if part.kind == "reasoning":
                self._held.skip(part.text)
            elif part.kind == "content":
                is_end = delta.reason is not None and number == len(parts) - 1
                told = self._logprobs(part.text, behind_call=behind_call, is_end=is_end)
            else:
                behind_call = True
            events += self._output.add(part, told)
        if parts and parts[-1].kind in ("call", "arguments"):
            self._held.take_all()
        return events

    def _logprobs(self, text: str, *, behind_call: bool, is_end: bool) -> list[dict[str, Any]]:
        """For the tokens of a content part. `is_end`: it is the answer's last part."""
        if not self._has_content and self._parser.has_reasoning:
            self._held.skip(CLOSE)
        self._has_content = True
        positions = self._held.take(text, latest=behind_call)
        if is_end:
            positions += self._held.take_all()
        return chat_logprobs(positions, self._request.top_logprobs or 0)["content"]

    def response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """The current state as the object that clients get."""
        response = begun_response(self._request, self._header, is_kept=self._keep is not None)
        if status == "in_progress":
            return response
        return response | {
            "status": status,
            "error": None if error is None else {"code": _code(error), "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output.items,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        counts = usage(self._generation)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": self._generation.num_cached_tokens or 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._parser.num_reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        }

    def _encode(self, events: Sequence[Event]) -> list[bytes]:
        """Numbered; a stream begins with two of its own, whatever comes first."""
        if not self._number:
            created = {"response": self.response("in_progress")}
            events = [{"type": f"response.{kind}", **created} for kind in ("created", "in_progress")] + [*events]
        first, self._number = self._number, self._number + len(events)
        return [
            named_event(event["type"], {**event, "sequence_number": number})
            for number, event in enumerate(events, first)
        ]


def _code(error: ApiError) -> str:
    """OpenAI's code of a response's error."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status == 400 else "server_error"


def begun_response(request: ResponsesRequest, header: Header, *, is_kept: bool) -> dict[str, Any]:
    """The object that clients get before anything is generated."""
    form = request.text.format if request.text else None
    return {
        "id": header.id,
        "object": "response",
        "created_at": header.created,
        "status": "in_progress",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": header.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": is_kept,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": _plain(request.tool_choice) if request.tool_choice else "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump(by_alias=True)


def _copied(value: Any) -> Any:
    """A copy of the current state: events are encoded later than they are created."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value
