"""The load of benchmarks.batches through a whole server: chats at /v1/chat/completions, a file at /v1/batches."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np

from benchmarks.served import Served, free_ports

CHAT = "/v1/chat/completions"
WORDS = "apple river stone cloud paper light green seven table music".split()
POLL_SECONDS = 0.2
GIVE_UP_SECONDS = 3600.0


@dataclass
class Waits:
    """Of all streams, in seconds."""

    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between two tokens of an answer

    def figures(self) -> dict[str, float]:
        """In milliseconds."""
        return {
            "first_token_p50": 1000 * statistics.median(self.first_tokens),
            "gap_p50": 1000 * statistics.median(self.gaps),
            "gap_p99": 1000 * float(np.percentile(self.gaps, 99)),
        }


@dataclass(frozen=True)
class Run:
    """One of the three: what the streams waited, and how fast the batch was."""

    waits: Waits
    lines: int
    seconds: float


class ServedLoad:
    """A server of this checkout, started and stopped with the context."""

    def __init__(
        self, folder: Path, arguments: Sequence[str], streams: int, chat_answer: int, line_answer: int
    ) -> None:
        """`chat_answer`, `line_answer`: tokens of an answer."""
        self._port = free_ports(1)[0]
        given = ["--openai-port", str(self._port), "--files-dir", str(folder / "files"), *arguments]
        self._served = Served(*given, log=folder / "log")
        self._streams, self._chat_answer, self._line_answer = streams, chat_answer, line_answer
        self._chance = Random(0)

    def __enter__(self) -> ServedLoad:
        self._served.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._served.stop()

    def run(self, lines: int, streams: bool, answers: int = 0) -> Run:
        """Until the batch has ended, and each stream has had `answers`."""
        return asyncio.run(self._run(lines, self._streams if streams else 0, answers))

    async def _run(self, lines: int, streams: int, answers: int) -> Run:
        waits, batch_is_over = Waits(), asyncio.Event()
        timeout = aiohttp.ClientTimeout(total=GIVE_UP_SECONDS)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self._port}", timeout=timeout) as session:
            if not lines:
                batch_is_over.set()
            chats = [asyncio.create_task(self._talk(session, waits, batch_is_over, answers)) for _ in range(streams)]
            begin = time.perf_counter()
            if lines:
                await self._compute(session, lines)
            seconds = time.perf_counter() - begin
            batch_is_over.set()
            await asyncio.gather(*chats)
        return Run(waits, lines, seconds)

    async def _talk(
        self, session: aiohttp.ClientSession, waits: Waits, batch_is_over: asyncio.Event, answers: int
    ) -> None:
        """Chat after chat."""
        done = 0
        while done < answers or not batch_is_over.is_set():
            tokens = self._chance.randrange(self._chat_answer // 2, self._chat_answer * 3 // 2)
            body = {**self._question(tokens, 24), "stream": True}
            last, heard = time.perf_counter(), False
            async with session.post(CHAT, json=body) as reply:
                reply.raise_for_status()
                async for line in reply.content:
                    if not line.startswith(b"data: {") or not json.loads(line[6:])["choices"]:
                        continue
                    now = time.perf_counter()
                    (waits.gaps if heard else waits.first_tokens).append(now - last)
                    last, heard = now, True
            done += 1

    async def _compute(self, session: aiohttp.ClientSession, lines: int) -> None:
        """A batch from its upload to its end."""
        asked = [
            {"custom_id": str(number), "method": "POST", "url": CHAT, "body": self._question(self._line_answer, 12)}
            for number in range(lines)
        ]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, asked)).encode(), filename="lines.jsonl")
        async with session.post("/v1/files", data=form) as reply:
            file = await reply.json()
        wish = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        async with session.post("/v1/batches", json=wish) as reply:
            batch = await reply.json()
        while batch["status"] not in ("completed", "failed"):
            await asyncio.sleep(POLL_SECONDS)
            async with session.get(f"/v1/batches/{batch['id']}") as reply:
                batch = await reply.json()
        if batch["request_counts"]["completed"] != lines:
            raise RuntimeError(f"the batch ended as {batch}")

    def _question(self, tokens: int, words: int) -> dict[str, Any]:
        text = " ".join(self._chance.choices(WORDS, k=words))
        message = {"role": "user", "content": text}
        return {"messages": [message], "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
