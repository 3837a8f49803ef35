"""Arrivals: requests become sequences, some of which have a deadline."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Collection

import numpy as np

from minisgl_backend.adapters.served import NO_ADAPTER
from minisgl_backend.arrays import Int32Array
from minisgl_backend.cache.salt import prefix_salt
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.request import SEED_RANGE, Request, check_prompt
from minisgl_backend.scheduler.adapters import AdapterBook
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.sequence import DEFAULT_LEVEL, Sequence, with_seed_of


class Arrivals:
    """Makes the sequences of requests, in the order in which these arrive."""

    def __init__(self, limits: SchedulerLimits, max_length: int, seed: int | None, adapters: AdapterBook) -> None:
        """`max_length`: tokens of the longest allowed sequence. `seed`: seeds the generator for requests without
        one."""
        self._limits = limits
        self._max_length = max_length
        self._seeds = random.Random(seed)
        self._count = 0
        self._adapters = adapters

    def prompt_of(self, request: Request) -> Int32Array:
        """The prompt's tokens, int32 [num_tokens]. Raises InvalidRequestError for a request that can never run."""
        if request.params.lora_name is not None:
            self._adapters.find(request.params.lora_name)
        if len(request.token_ids) % 4:
            raise InvalidRequestError(f"token_ids has {len(request.token_ids)} bytes; allowed: 4 for each token")
        token_ids = np.frombuffer(request.token_ids, dtype="<i4").astype(np.int32, copy=False)
        limited_by = "the model's limit, or max_seq_len_override"
        if self._max_length < self._limits.max_seq_len:
            limited_by = f"{self._limits.num_pages} KV pages; see num_pages and memory_ratio"
        check_prompt("the prompt", token_ids, max_seq_len=self._max_length, limited_by=limited_by)
        return token_ids

    def sequences_of(self, request: Request, token_ids: Int32Array, tenant: int, num_admissions: int) -> list[Sequence]:
        """A sequence for each answer of a request with this prompt. `num_admissions`: admissions of all sequences so
        far."""
        params, adapter, salt = request.params, NO_ADAPTER, b""
        if params.lora_name is not None:
            adapter = self._adapters.find(params.lora_name)
        if params.cache_salt is not None or adapter is not NO_ADAPTER:  # few have either
            salt = prefix_salt(params.cache_salt, adapter.digest)
        seed = params.seed if params.seed is not None else self._seeds.randrange(SEED_RANGE)
        arrival, self._count = self._count, self._count + 1
        return [
            Sequence(
                uid=request.uid + index,
                token_ids=token_ids,
                params=with_seed_of(params, seed, index),
                level=request.priority or DEFAULT_LEVEL,
                arrival=arrival,
                deadline=request.deadline,
                admissions_before=num_admissions,
                pooling=request.pooling,
                tenant=tenant,
                contents=request.contents,
                adapter=adapter,
                salt=salt,
                stable_len=request.stable_len or len(token_ids),
                borders=request.borders,
            )
            for index in range(params.n)
        ]


class Deadlines:
    """The deadlines of sequences; seconds of the scheduler's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # (deadline, uid); may hold sequences that have ended
        self.first = math.inf  # the earliest deadline

    def add(self, deadline: float, uid: int, alive: Collection[int]) -> None:
        """`alive`: uids of all sequences that have not ended; others are removed once there are many of them."""
        heapq.heappush(self._heap, (deadline, uid))
        if len(self._heap) > 2 * len(alive) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in alive]
            heapq.heapify(self._heap)
        self.first = self._heap[0][0]

    def take_expired(self, now: float) -> list[int]:
        """The uids whose deadline has passed, each once."""
        uids = []
        while self._heap and self._heap[0][0] <= now:
            uids.append(heapq.heappop(self._heap)[1])
        self.first = self._heap[0][0] if self._heap else math.inf
        return uids
