"""The engine in this process: prompts in, finished answers out.

With tensor parallelism the followers are child processes.

    with LLM("demo") as llm:
        print(llm.chat([{"role": "user", "content": "What is 17 + 25?"}], temperature=0)[0].text)
        for piece in llm.stream("Count from 1 to 20.", max_tokens=50):
            print(piece.text, end="", flush=True)
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minisgl_backend.config import OPTIONS, EngineConfig
from minisgl_backend.engine.build import Engine, build_engine
from minisgl_backend.environment import Environment
from minisgl_backend.errors import CapacityError, ConfigError, EngineDeadError, InvalidRequestError
from minisgl_backend.process.resources import set_torch_defaults
from minisgl_backend.process.stop_signals import interrupted_at_the_end
from minisgl_backend.request import FinishReason, Grammar, SamplingParams, check_prompt
from minisgl_backend.scheduler.outputs import NO_TOKEN, SequenceOutputs
from minisgl_backend.step import SequenceDetail, StepStats
from minisgl_backend.text.answers import Answer, AnswerStream, RequestOutput, StreamPiece
from minisgl_backend.text.prompts import listed
from minisgl_backend.text.vocabulary import Vocabulary, empty_vocabulary, has_tokenizer, load_vocabulary

if TYPE_CHECKING:
    from minisgl_backend.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]  # a text, token ids, or one of both in the form of vLLM's dicts
Params = SamplingParams | Mapping[str, Any]
Message = Mapping[str, Any]

log = logging.getLogger(__name__)

COMPILER_WAIT_S = 0.001


class LLM:
    """One model, loaded into this process. Close it, or use it as a context manager.

    Calls of `generate` and `chat` from several threads are served one after the other.
    """

    def __init__(self, model: str = "demo", *, environment: Environment | None = None, **options: Any) -> None:
        """`options` are the fields of EngineConfig. Raises ConfigError for what cannot be served."""
        self._dead = ""
        self._engine: Engine | None = None
        set_torch_defaults()
        unknown = set(options) - set(OPTIONS)
        if unknown:
            allowed = ", ".join(name for name, option in OPTIONS.items() if not option.internal)
            raise ConfigError(f"unknown option {min(unknown)!r}; allowed: {allowed}")
        self.config = EngineConfig(model=model, **options)
        _refuse_what_needs_a_server(self.config)
        note_loss = weakref.WeakMethod(self._note_loss)  # a thread that watches other ranks must not keep this alive
        self._engine = build_engine(
            self.config,
            environment or Environment.read(),
            on_hang_or_death=lambda reason: (note := note_loss()) and note(reason),
        )
        # Also where a script ends without `close`: before Python takes apart what it needs, unlike __del__.
        self._close_engine = weakref.finalize(self, self._engine.close)
        model_dir = self._engine.model_dir
        self._vocabulary = self._load_vocabulary(model_dir)
        self._model_dir = model_dir
        self._next_uid = 0
        self._uid_lock = threading.Lock()
        self._turn = threading.Lock()  # held by the call that steps the engine
        self._turn_of: int | None = None  # the thread that holds it
        self._streaming = False  # and whether it does so for a stream, so for as long as its reader likes

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the model and ends the followers. Safe to call twice."""
        self._engine = None
        self._close_engine()

    def _load_vocabulary(self, model_dir: Path) -> Vocabulary:
        if has_tokenizer(model_dir):
            return load_vocabulary(model_dir, trust_remote_code=self.config.trust_remote_code)
        log.warning("%s has no tokenizer: prompts must be token ids, and answers have no text", model_dir)
        return empty_vocabulary()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded when first asked for, at the latest by a prompt that is a text. Raises ConfigError."""
        # Importing transformers takes seconds, which token ids need not wait for.
        from minisgl_backend.text.tokenizer import Tokenizer

        return Tokenizer(self._model_dir, trust_remote_code=self.config.trust_remote_code)

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineDeadError after `close`, and when it has failed."""
        if self._engine is None or self._dead:
            raise EngineDeadError(self._dead or "this LLM is closed")
        return self._engine

    @property
    def stats(self) -> StepStats:
        """Counters after the last step."""
        return self.engine.core.stats()

    def sampling_params(self, **values: Any) -> SamplingParams:
        """The model's own defaults (generation_config.json), with `values` in place of some; None means the default.

        Raises InvalidRequestError for an unknown name and for a value of the wrong type.
        """
        unknown = set(values) - set(SamplingParams.__struct_fields__)
        if unknown:
            raise InvalidRequestError(
                f"unknown sampling parameter {min(unknown)!r}; allowed: {', '.join(SamplingParams.__struct_fields__)}"
            )
        given = {name: value for name, value in values.items() if value is not None}
        return SamplingParams(**{**self.engine.model.generation.sampling_values(), **given})

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Iterable[Params] | None = None,
        *,
        progress: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or several, through the model's chat template."""
        if isinstance(messages, (str, Mapping)):
            raise InvalidRequestError(
                f"messages is a {type(messages).__name__}; allowed: a list of objects with role and content, or a list "
                "of such lists"
            )
        conversations: Sequence[Sequence[Message]]
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages  # type: ignore
        prompts = [self._render(conversation, template_arguments) for conversation in conversations]
        return self.generate(prompts, sampling_params, progress=progress, **values)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params | None = None,
        *,
        template_arguments: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> Generator[StreamPiece, None, None]:
        """`stream` for one conversation, through the model's chat template."""
        return self.stream(self._render(messages, template_arguments), sampling_params, **values)

    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None, **values: Any
    ) -> Generator[StreamPiece, None, None]:
        """Continues one prompt; the answer in pieces, one each step of the engine.

        Closing the generator ends the answer. While it is read, nothing else can be asked. Parameters and errors are
        those of `generate`; `n` must be 1.
        """
        prompts = listed(prompt)
        if len(prompts) != 1:
            raise InvalidRequestError(f"the prompt is {len(prompts)} prompts; allowed in a stream: 1")
        (answer,) = self._answers(prompts, sampling_params, values, pieces=True)
        if len(answer.streams) > 1:
            raise InvalidRequestError(f"n is {len(answer.streams)}; allowed in a stream: 1")
        return self._pieces(answer)

    def _pieces(self, answer: Answer) -> Generator[StreamPiece, None, None]:
        (stream,) = answer.streams
        with contextlib.closing(self._turns([answer], streaming=True)) as turns:
            for _ in turns:
                yield stream.take_piece()

    def _render(self, messages: Sequence[Message], template_arguments: Mapping[str, Any] | None) -> list[int]:
        return self.tokenizer.encode(
            self.tokenizer.render(messages, **(template_arguments or {})), add_special_tokens=False
        )

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Iterable[Params] | None = None,
        *,
        progress: bool = False,
        **values: Any,
    ) -> list[RequestOutput]:
        """Continues each prompt: a text, or token ids as a list, an array or tensor of one dimension; answers are in
        the prompts' order. Either may stand in a mapping, as in vLLM: {"prompt": ...}, {"prompt_token_ids": ...}.

        `sampling_params`: one for all, or one for each prompt, each also as a mapping of its fields; without them the
        model's defaults, changed by `values` (max_tokens=..., temperature=...). Raises InvalidRequestError for a
        request that cannot be served, and EngineDeadError where the engine fails; nothing is left running then.
        """
        answers = self._answers(listed(prompts), sampling_params, values)
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Progress(*columns, console=Console(stderr=True), disable=not progress)
        task = bar.add_task("", total=sum(len(answer.streams) for answer in answers))
        with bar, contextlib.closing(self._turns(answers)) as turns:
            for ended in turns:
                if ended:
                    bar.update(task, advance=ended)
        return [answer.output() for answer in answers]

    def _answers(
        self,
        prompts: Sequence[str | list[int]],
        sampling_params: Params | Iterable[Params] | None,
        values: Mapping[str, Any],
        *,
        pieces: bool = False,
    ) -> list[Answer]:
        """Checked, and not yet begun. `pieces`: their texts are wanted as they grow."""
        if sampling_params is not None and values:
            raise InvalidRequestError(f"{min(values)} is given beside sampling_params; allowed: one or the other")
        token_ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        if sampling_params is None:
            sampling_params = self.sampling_params(**values)
        if isinstance(sampling_params, (SamplingParams, Mapping)):
            every = [self._params(sampling_params)] * len(token_ids)
        elif isinstance(sampling_params, Iterable) and not isinstance(sampling_params, str):
            every = [self._params(one) for one in sampling_params]
        else:
            _refuse_params(sampling_params)
        if len(every) != len(token_ids):
            raise InvalidRequestError(
                f"sampling_params has {len(every)} entries; allowed: one, or one for each of the "
                f"{len(token_ids)} prompts"
            )
        welcome = self.engine.welcome
        answers = []
        for ids, params in zip(token_ids, every, strict=True):
            params = self._translate(params)
            params.validate(welcome.vocab_size)
            check_prompt("the prompt", ids, vocab_size=welcome.vocab_size, max_seq_len=welcome.max_seq_len)
            answers.append(Answer(self._new_uid(params.n), ids, params, self._vocabulary, pieces))
        return answers

    def _params(self, given: Params) -> SamplingParams:
        if isinstance(given, SamplingParams):
            return given
        return self.sampling_params(**given) if isinstance(given, Mapping) else _refuse_params(given)

    def _translate(self, params: SamplingParams) -> SamplingParams:
        """Bad words, and stop strings that are special tokens, as token ids.

        Raises InvalidRequestError for stop strings where no token has a text.
        """
        if params.stop and not len(self._vocabulary):
            raise InvalidRequestError(f"stop is {params.stop!r}; allowed: none, as this model has no tokenizer")
        special = self._vocabulary.special_tokens
        ends = tuple(special[text] for text in params.stop if text in special)
        if ends:  # their text is no part of an answer, so that it would never be found there
            params = msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
        if not params.bad_words:
            return params
        params.validate()  # before a tokenizer works on them
        words = (*params.bad_words_token_ids, *self.tokenizer.encode_words(params.bad_words))
        return msgspec.structs.replace(params, bad_words_token_ids=tuple(dict.fromkeys(words)))

    def _new_uid(self, count: int) -> int:
        with self._uid_lock:
            uid = self._next_uid
            self._next_uid += count
        return uid

    @contextlib.contextmanager
    def _own_turn(self, *, streaming: bool) -> Iterator[None]:
        """Waits for calls of other threads; but who reads a stream may not come back, or be this very thread."""
        if self._streaming or self._turn_of == threading.get_ident():
            raise InvalidRequestError("an answer is being streamed; allowed: one at a time, read to its end or closed")
        with self._turn:
            self._turn_of, self._streaming = threading.get_ident(), streaming
            try:
                yield
            finally:
                self._turn_of, self._streaming = None, False

    def _turns(self, answers: Sequence[Answer], *, streaming: bool = False) -> Generator[int, None, None]:
        with self._own_turn(streaming=streaming):
            yield from self._steps(answers)

    def _steps(self, answers: Sequence[Answer]) -> Generator[int, None, None]:
        """Steps the engine until all are answered; after each step, how many sequences have ended with it.

        Closed early, it ends what is open.
        """
        core = self.engine.core
        waiting = deque(answers)
        open_streams: dict[int, AnswerStream] = {}
        try:
            while waiting or open_streams:
                with interrupted_at_the_end():
                    self._feed(waiting, open_streams)
                    if not self._step() and core.waits_for_compiler:
                        time.sleep(COMPILER_WAIT_S)
                    ended = self._end_rejected(answers, open_streams)
                    ended += self._take(core.drain_outputs(), open_streams)
                yield ended
            with interrupted_at_the_end():
                self._drain()
        except BaseException:
            self._abandon(open_streams)
            raise

    def _feed(self, waiting: deque[Answer], open_streams: dict[int, AnswerStream]) -> None:
        """Submits as many requests as the engine's queue and its compilers of grammars take, and leaves the rest."""
        engine, room = self.engine, 0
        if waiting:  # those whose grammar is being compiled join the queue, all at once perhaps
            taken = engine.core.stats().num_waiting + engine.core.num_compiling
            room = self.config.max_waiting_requests - taken
        while waiting and room > 0:
            is_guided = waiting[0].request.params.grammar is not None
            if is_guided and engine.core.waits_for_compiler and engine.core.room_for_grammars <= 0:
                break
            answer = waiting.popleft()
            open_streams.update((stream.uid, stream) for stream in answer.streams)
            engine.core.submit(answer.request)
            room -= answer.request.params.n

    def _end_rejected(self, answers: Sequence[Answer], open_streams: dict[int, AnswerStream]) -> int:
        """Raises what a request was refused for; but where its grammar was followed in this call already, and found too
        slow meanwhile, the request alone ends with it. Returns how many streams have ended."""
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
        return before - len(open_streams)

    def _take(self, outputs: SequenceOutputs | None, open_streams: dict[int, AnswerStream]) -> int:
        """Gives each record to its stream; returns how many streams have ended."""
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
                if not reason:  # a stop string, which the engine does not know of
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
        except BaseException as error:  # of whoever was too impatient for the step's end, above all
            self._dead = self._dead or f"a step was broken off: {error!r}"
            raise
        if self._dead:  # what a step computes without its other ranks is no answer
            raise EngineDeadError(self._dead)
        return busy

    def _abandon(self, open_streams: dict[int, AnswerStream]) -> None:
        """Leaves an engine that the next call can use."""
        if self._engine is None or self._dead:
            return
        with interrupted_at_the_end():
            self._engine.core.abort(list(open_streams), FinishReason.CANCELLED)
            try:
                self._drain()
            except EngineDeadError as error:
                self._dead = str(error)

    def _drain(self) -> None:
        """Commits what is in flight of sequences that have ended, so that they hold no pages until the next call."""
        core = self.engine.core
        while self._step():
            pass
        core.drain_outputs()
        core.take_rejected()

    def _note_loss(self, reason: str) -> None:
        self._dead = reason


def _refuse_params(given: object) -> NoReturn:
    raise InvalidRequestError(
        f"sampling_params is {given!r:.60}; allowed: SamplingParams or a mapping of its fields, or a list of them"
    )


def _refuse_what_needs_a_server(config: EngineConfig) -> None:
    if config.dp > 1:
        raise ConfigError(
            f"dp is {config.dp}; allowed in one process: 1. Several engine cores need a server: "
            f"scripts/serve.sh --dp {config.dp}"
        )
    if config.kv_events_endpoint is not None:
        raise ConfigError(
            f"kv_events_endpoint is {config.kv_events_endpoint!r}; allowed in one process: unset. A server publishes "
            f"KV events: scripts/serve.sh --kv-events-endpoint {config.kv_events_endpoint!r}"
        )


def _is_followed(grammar: Grammar | None, answers: Sequence[Answer]) -> bool:
    """Whether a sequence of these has tokens by this grammar."""
    if grammar is None:
        return False
    return any(
        stream.token_ids for answer in answers if answer.request.params.grammar == grammar for stream in answer.streams
    )
