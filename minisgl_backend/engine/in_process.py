"""An engine core that is stepped in the caller's own process: takes requests, yields after each step."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.build import Engine, build_engine
from minisgl_backend.environment import Environment
from minisgl_backend.errors import CapacityError, ConfigError, EngineDeadError, InvalidRequestError
from minisgl_backend.ipc.messages import AdapterCommand, Done, Failed
from minisgl_backend.process.stop_signals import interrupted_at_the_end
from minisgl_backend.request import FinishReason, Grammar
from minisgl_backend.scheduler.outputs import NO_TOKEN, SequenceOutputs
from minisgl_backend.step import SequenceDetail
from minisgl_backend.text.answers import Answer, AnswerStream, PooledAnswer

COMPILER_WAIT_S = 0.001
_COMMAND_ERRORS = {kind.__name__: kind for kind in (ConfigError, CapacityError, InvalidRequestError)}
AnyAnswer = Answer | PooledAnswer
AnyStream = AnswerStream | PooledAnswer


class InProcessEngine:
    """An engine, and the one call at a time that steps it. Calls from several threads run one after the other."""

    def __init__(self, config: EngineConfig, environment: Environment) -> None:
        """Builds the engine. Raises ConfigError for options or a model that cannot be served."""
        self._dead = ""
        self._commands = 0
        self._max_waiting = config.max_waiting_requests
        self._turn = threading.Lock()  # held by the call that steps the engine
        self._turn_of: int | None = None  # the thread that holds it
        self._streaming = False  # whether that call is a stream, which lasts as long as its reader likes
        note_loss = weakref.WeakMethod(self._note_loss)  # the thread that watches other ranks must not keep this alive
        self._engine: Engine | None = build_engine(
            config, environment, on_hang_or_death=lambda reason: (note := note_loss()) and note(reason)
        )
        # Also runs when a script ends without `close`, and earlier than __del__, which would find modules torn down.
        self._close_engine = weakref.finalize(self, self._engine.close)

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineDeadError after `close`, and when it has failed."""
        if self._engine is None or self._dead:
            raise EngineDeadError(self._dead or "this LLM is closed")
        return self._engine

    def close(self) -> None:
        """Frees the model and ends the followers. Safe to call twice."""
        self._engine = None
        self._close_engine()

    def command(self, make: Callable[[int], AdapterCommand]) -> Done:
        """Gives the engine a command (of that id), steps it until it is done, and returns its answer. Raises
        ConfigError, CapacityError or InvalidRequestError, as it says."""
        with self._own_turn(streaming=False):
            self._commands += 1
            self.engine.core.obey(make(self._commands))
            while not (answers := self.engine.core.take_answers()):
                if not self._step():
                    time.sleep(COMPILER_WAIT_S)
        _, answer = answers[0]
        if isinstance(answer, Failed):
            raise _COMMAND_ERRORS[answer.kind](answer.message)
        return answer

    @contextlib.contextmanager
    def _own_turn(self, *, streaming: bool) -> Iterator[None]:
        """Waits for calls of other threads; not for a stream, whose reader may never return or be this very thread."""
        if self._streaming or self._turn_of == threading.get_ident():
            raise InvalidRequestError("an answer is being streamed; allowed: one at a time, read to its end or closed")
        with self._turn:
            self._turn_of, self._streaming = threading.get_ident(), streaming
            try:
                yield
            finally:
                self._turn_of, self._streaming = None, False

    def turns(self, answers: Sequence[AnyAnswer], *, streaming: bool = False) -> Generator[int, None, None]:
        with self._own_turn(streaming=streaming):
            yield from self._steps(answers)

    def _steps(self, answers: Sequence[AnyAnswer]) -> Generator[int, None, None]:
        """Steps the engine until all requests are answered; yields the number of sequences that ended with each step.

        If closed early, it ends the open sequences.
        """
        core = self.engine.core
        waiting = deque(answers)
        open_streams: dict[int, AnyStream] = {}
        try:
            while waiting or open_streams:
                with interrupted_at_the_end():
                    self._feed(waiting, open_streams)
                    if not self._step() and core.waits_for_thread:
                        time.sleep(COMPILER_WAIT_S)
                    ended = self._end_rejected(answers, open_streams)
                    ended += self._take(core.drain_outputs(), open_streams)
                yield ended
            with interrupted_at_the_end():
                self._drain()
        except BaseException:
            self._abandon(open_streams)
            raise
        finally:
            for answer in answers:
                answer.end()

    def _feed(self, waiting: deque[AnyAnswer], open_streams: dict[int, AnyStream]) -> None:
        """Submits requests until the engine's queue or its grammar compilers are full, and leaves the rest."""
        engine, room = self.engine, 0
        if waiting:  # requests whose grammar is being compiled join the queue later, perhaps all at once
            taken = engine.core.stats().num_waiting + engine.core.num_compiling + engine.core.num_reading
            room = self._max_waiting - taken
        while waiting and room > 0:
            has_grammar = waiting[0].request.params.grammar is not None
            if has_grammar and engine.core.num_compiling and engine.core.room_for_grammars <= 0:
                break
            answer = waiting.popleft()
            try:
                request = answer.begin()
            except CapacityError:  # no room for its images until others have ended
                if not open_streams:
                    raise
                waiting.appendleft(answer)
                break
            open_streams.update((stream.uid, stream) for stream in answer.streams)
            engine.core.submit(request)
            room -= request.params.n

    def _end_rejected(self, answers: Sequence[AnyAnswer], open_streams: dict[int, AnyStream]) -> int:
        """Raises the reason for which a request was refused. Exception: a grammar that this call already followed and
        that then proved too slow ends its own request alone. Returns the number of streams that have ended."""
        before = len(open_streams)
        for rejected in self.engine.core.take_rejected():
            first = open_streams.get(rejected.uid)
            if first is None or not _is_followed(first.answer.request.params.grammar, answers):
                kind = CapacityError if rejected.kind == CapacityError.__name__ else InvalidRequestError
                raise kind(rejected.message)
            for uid in range(rejected.uid, rejected.uid + rejected.count):
                stream = open_streams.pop(uid)
                stream.take_detail(SequenceDetail(error=rejected.message))
                stream.append(NO_TOKEN, FinishReason.ERROR)
                stream.answer.note_end()
        return before - len(open_streams)

    def _take(self, outputs: SequenceOutputs | None, open_streams: dict[int, AnyStream]) -> int:
        """Gives each record to its stream; returns the number of streams that have ended."""
        if outputs is None:
            return 0
        before, details = len(open_streams), outputs.details
        records = zip(outputs.uids.tolist(), outputs.token_ids.tolist(), outputs.reasons.tolist(), strict=True)
        for index, (uid, token, reason) in enumerate(records):
            stream = open_streams.get(uid)
            if stream is None:
                continue
            if details and index in details:
                stream.take_detail(details[index])
            if stream.append(token, reason):
                del open_streams[uid]
                stream.answer.note_end()
                if not reason:  # a stop string, which the engine does not know about
                    self.engine.core.abort([uid], FinishReason.STOP)
        return before - len(open_streams)

    def _step(self) -> bool:
        engine = self.engine
        try:
            with engine.heartbeat.step():
                busy = engine.core.step()
        except EngineDeadError as error:
            self._dead = self._dead or str(error)
            raise EngineDeadError(self._dead) from error
        except BaseException as error:  # above all KeyboardInterrupt
            self._dead = self._dead or f"a step was broken off: {error!r}"
            raise
        if self._dead:  # results of a step without its other ranks are invalid
            raise EngineDeadError(self._dead)
        return busy

    def _abandon(self, open_streams: dict[int, AnyStream]) -> None:
        """Ends the open streams, so that the next call finds a usable engine."""
        if self._engine is None or self._dead:
            return
        with interrupted_at_the_end():
            self._engine.core.abort(list(open_streams), FinishReason.CANCELLED)
            try:
                self._drain()
            except EngineDeadError as error:
                self._dead = str(error)

    def _drain(self) -> None:
        """Commits the steps in flight of ended sequences, so that these hold no pages until the next call."""
        core = self.engine.core
        while self._step():
            pass
        core.drain_outputs()
        core.take_rejected()

    def _note_loss(self, reason: str) -> None:
        self._dead = reason


def _is_followed(grammar: Grammar | None, answers: Sequence[AnyAnswer]) -> bool:
    """Whether a sequence of these answers has tokens that followed this grammar."""
    if grammar is None:
        return False
    return any(
        stream.token_ids for answer in answers if answer.request.params.grammar == grammar for stream in answer.streams
    )
