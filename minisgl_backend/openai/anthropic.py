"""/v1/messages: a chat's answer as Anthropic's content blocks, whole or as its events."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from minisgl_backend.openai.answers import Header
from minisgl_backend.openai.encoding import encode
from minisgl_backend.openai.errors import ApiError, anthropic_error
from minisgl_backend.openai.message import MessageParser, new_call_id
from minisgl_backend.openai.sse import named_event
from minisgl_backend.openai.triton import Delta, Generation
from minisgl_backend.parsers.parts import Part

Event = dict[str, Any]

# Clients drop thoughts without one from the conversation. Nothing here reads it.
_SIGNATURE = base64.b64encode(b"minisgl").decode()


class ContentBlocks:
    """The growing blocks of one answer, and their events.

    A call becomes a block when it is complete: clients run what they get. One whose arguments are no JSON object, or
    were cut off, is text.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = False  # the last block goes on
        self._call: Part | None = None  # is being written
        self._arguments = ""  # its JSON so far

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, part: Part) -> list[Event]:
        if part.kind == "call":
            events = self._end_call()
            self._call = part
            return events
        if part.kind == "arguments":
            self._arguments += part.text
            return []
        return self._end_call() + self._grow("thinking" if part.kind == "reasoning" else "text", part.text)

    def finish(self, reason: str) -> list[Event]:
        """The answer is complete. `reason`: as that of a delta."""
        return self._end_call(is_cut=reason == "length") + self._close()

    def _end_call(self, *, is_cut: bool = False) -> list[Event]:
        call, text = self._call, self._arguments
        if call is None:
            return []
        self._call, self._arguments = None, ""
        if not _is_object(text if is_cut else text or "{}"):
            name = json.dumps(call.text, ensure_ascii=False)
            return self._grow("text", f'{{"name": {name}, "arguments": {text}{"" if is_cut else "}"}')
        events = self._begin({"type": "tool_use", "id": call.id or new_call_id(), "name": call.text, "input": {}})
        if text:
            # As the model wrote it: numbers beyond all types, and halves of surrogate pairs, which only escapes can
            # express. In JSON, ends of lines stand between values alone.
            self.blocks[-1]["input"] = msgspec.Raw(text.replace("\n", " ").replace("\r", " ").encode())
            events.append(self._delta("input_json_delta", partial_json=text))
        return events

    def _grow(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._open or self.blocks[-1]["type"] != kind:
            events = self._begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self.blocks[-1][kind] += text
        return [*events, self._delta(f"{kind}_delta", **{kind: text})]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self._open = True
        self.blocks.append(block)
        return [*events, {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": {**block}}]

    def _close(self) -> list[Event]:
        """The last block is complete."""
        if not self._open:
            return []
        self._open, events = False, []
        if "signature" in self.blocks[-1]:
            self.blocks[-1]["signature"] = _SIGNATURE
            events.append(self._delta("signature_delta", signature=_SIGNATURE))
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _delta(self, kind: str, **values: str) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, **values}}


def _is_object(text: str) -> bool:
    """Whether it is a JSON object; NaN and the infinities are no JSON."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(name: str) -> None:
    raise ValueError(name)


class MessagesAnswer:
    """One request in progress."""

    keep_alive = named_event("ping", {"type": "ping"})

    def __init__(
        self,
        generation: Generation,
        header: Header,
        parser: MessageParser | None,
        stop_sequences: Sequence[str] = (),
        added_tokens: Sequence[str] = (),
    ) -> None:
        """`parser`: None if the text is the content unchanged. With `stop_sequences`, `generation` also returns the
        text that ended it: one of them, or one of the model's `added_tokens`."""
        self._generation = generation
        self._header = header
        self._parser = parser or MessageParser()
        self._parser.tell_at_end()  # a call that turns out to be none has then not been told, in a stream neither
        self._stop_sequences = stop_sequences
        self._added_tokens = added_tokens if stop_sequences and generation.has_special_tokens else ()
        self._blocks = ContentBlocks()
        self._stopped_by: str | None = None
        self._reason: str | None = None

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        begun = False
        async for events in self._progress():
            if not begun:
                events = [{"type": "message_start", "message": self._message([], None)}, *events]
                begun = True
            if self._reason is not None:
                ended = {"stop_reason": self._reason, "stop_sequence": self._stopped_by}
                events.append({"type": "message_delta", "delta": ended, "usage": self._usage()})
                events.append({"type": "message_stop"})
            if events:
                yield b"".join(named_event(event["type"], event) for event in events)

    async def whole(self) -> bytes:
        """The whole answer."""
        async for _ in self._progress():
            pass
        return encode(self._message(self._blocks.blocks, self._reason))

    @staticmethod
    def error_event(error: ApiError) -> bytes:
        return named_event("error", anthropic_error(error))

    async def _progress(self) -> AsyncIterator[list[Event]]:
        while (delta := await self._generation.next()) is not None:
            delta = self._without_stop(delta)
            events: list[Event] = []
            for part in self._parser.feed(delta):
                events += self._blocks.add(part)
            if delta.reason is not None:
                events += self._blocks.finish(delta.reason)
                self._reason = self._stop_reason(delta.reason)
            yield events
        await self._generation.drain()

    def _without_stop(self, delta: Delta) -> Delta:
        """Removes the text that ended the answer, which always comes in one piece, with the last delta."""
        if delta.reason != "stop":
            return delta
        found = [one for one in self._stop_sequences if one and (one == delta.stop_text or delta.text.endswith(one))]
        if not found:
            ended = [token for token in self._added_tokens if token and delta.text.endswith(token)]
            return replace(delta, text=delta.text.removesuffix(max(ended, key=len, default="")))
        self._stopped_by = max(found, key=len)
        return replace(delta, text=delta.text.removesuffix(self._stopped_by), stop_text=self._stopped_by)

    def _stop_reason(self, reason: str) -> str:
        if reason == "length":
            return "max_tokens"
        if self._blocks.has_calls and not self._parser.is_cut:
            return "tool_use"
        return "end_turn" if self._stopped_by is None else "stop_sequence"

    def _message(self, content: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        return {
            "id": self._header.id,
            "type": "message",
            "role": "assistant",
            "model": self._header.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None if reason is None else self._stopped_by,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """The number of cached tokens is known at the end; `input_tokens` does not include it."""
        cached = self._generation.num_cached_tokens or 0
        return {
            "input_tokens": self._generation.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._generation.num_output_tokens,
        }
