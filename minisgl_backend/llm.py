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
import os
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minisgl_backend.config import ADAPTER_NAMES, OPTIONS, EngineConfig, is_adapter_name
from minisgl_backend.delivery.prompt_images import PromptImages, SeenIds
from minisgl_backend.engine.build import Engine
from minisgl_backend.engine.in_process import InProcessEngine
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, EngineDeadError, InvalidRequestError
from minisgl_backend.foreign_options import explain_unknown_argument
from minisgl_backend.ipc.messages import ReadAdapter, ServeAdapter, UnloadAdapter
from minisgl_backend.parsers.thinking import TAIL, thinking_tags
from minisgl_backend.process.resources import give_back_memory, set_torch_defaults
from minisgl_backend.request import PoolingParams, SamplingParams, check_prompt
from minisgl_backend.step import StepStats
from minisgl_backend.text import scoring
from minisgl_backend.text.answers import Answer, EmbeddingOutput, PooledAnswer, RequestOutput, StreamPiece
from minisgl_backend.text.prompt_borders import NO_PARTS, ChatIds, PromptBorders
from minisgl_backend.text.prompts import GivenPrompt, PromptWithImages, adapter_names, listed
from minisgl_backend.text.tokenizer_file import TokenizerFiles, has_tokenizer
from minisgl_backend.text.vocabulary import Vocabulary, empty_vocabulary, load_vocabulary

if TYPE_CHECKING:
    from minisgl_backend.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]  # a text, token ids, or one of both in a mapping like vLLM's
ReadPrompt = list[int] | SeenIds | ChatIds  # token ids, or those of a prompt with images or a chat
Params = SamplingParams | Mapping[str, Any]
Message = Mapping[str, Any]

log = logging.getLogger(__name__)


class LLM:
    """One model, loaded into this process. Close it, or use it as a context manager.

    Calls of `generate` and `chat` from several threads run one after the other.
    """

    def __init__(self, model: str = "demo", *, environment: Environment | None = None, **options: Any) -> None:
        """`options` are the fields of EngineConfig. Raises ConfigError for options or a model that cannot be served."""
        set_torch_defaults()
        unknown = set(options) - set(OPTIONS)
        if unknown:
            known = [name for name, option in OPTIONS.items() if not option.internal]
            first, *others = sorted(unknown)
            raise ConfigError(explain_unknown_argument(first, known, others))
        self.config = EngineConfig(model=model, **options)
        _refuse_what_needs_a_server(self.config)
        self._driver = InProcessEngine(self.config, environment or Environment.read())
        model_dir = self._driver.engine.model_dir
        self._tokenizer_files = TokenizerFiles(model_dir) if has_tokenizer(model_dir) else None
        self._vocabulary = self._load_vocabulary(model_dir)
        self._model_dir = model_dir
        self._next_uid = 0
        self._uid_lock = threading.Lock()
        give_back_memory()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the model and ends the followers. Safe to call twice."""
        self._driver.close()
        if "_images" in self.__dict__:
            self._images.close()

    def _load_vocabulary(self, model_dir: Path) -> Vocabulary:
        trusts, files = self.config.trust_remote_code, self._tokenizer_files
        if files is not None:
            return load_vocabulary(model_dir, trust_remote_code=trusts, files=files)
        log.warning("%s has no tokenizer: prompts must be token ids, and answers have no text", model_dir)
        return empty_vocabulary()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded at first use, at the latest for a prompt that is a text. Raises ConfigError."""
        # Importing transformers takes seconds, which prompts of token ids need not wait for.
        from minisgl_backend.text.tokenizer import Tokenizer

        trusts, files = self.config.trust_remote_code, self._tokenizer_files
        return Tokenizer(self._model_dir, trust_remote_code=trusts, files=files)

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineDeadError after `close`, and when it has failed."""
        return self._driver.engine

    @property
    def stats(self) -> StepStats:
        """Counters after the last step."""
        return self.engine.core.stats()

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """`lora_name` of later requests stands for the LoRA adapter in that folder, also where it stood for another.
        Raises ConfigError where the folder is no adapter of this model, or there is no room for it (max_lora_rank)."""
        if not is_adapter_name(name):
            raise InvalidRequestError(f"name is {name[:200]!r}; allowed: {ADAPTER_NAMES}")
        path = os.path.realpath(folder)
        read = self._driver.command(lambda number: ReadAdapter(front=0, id=number, folder=path))
        self._driver.command(
            lambda number: ServeAdapter(front=0, id=number, read=read.id, name=name, folder=path, digest=read.result)
        )

    def unload_adapter(self, name: str) -> None:
        """Later requests cannot name it. Raises InvalidRequestError where none can now."""
        self._driver.command(lambda number: UnloadAdapter(front=0, id=number, name=name))

    def sampling_params(self, **values: Any) -> SamplingParams:
        """The model's own defaults (generation_config.json), some replaced by `values`; None means the default.

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
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or several, through the model's chat template. Images are content parts:
        OpenAI's with a data URL, or {"type": "image", "image": ...} with one of Pillow, an array, bytes or a path."""
        if isinstance(messages, (str, Mapping)):
            raise InvalidRequestError(
                f"messages is a {type(messages).__name__}; allowed: a list of objects with role and content, or a list "
                "of such lists"
            )
        conversations: Sequence[Sequence[Message]]
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages  # type: ignore
        prompts = [self._render(one, template_arguments, mm_processor_kwargs) for one in conversations]
        return self._run(prompts, sampling_params, values, progress)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params | None = None,
        *,
        template_arguments: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> Generator[StreamPiece, None, None]:
        """`stream` for one conversation, through the model's chat template; images as in `chat`."""
        return self._stream([self._render(messages, template_arguments, mm_processor_kwargs)], sampling_params, values)

    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None, **values: Any
    ) -> Generator[StreamPiece, None, None]:
        """Continues one prompt; yields the answer in pieces, one per step of the engine.

        Closing the generator ends the answer. Other calls are refused while it is being read. Parameters and errors are
        those of `generate`; `n` must be 1.
        """
        return self._stream([self._read(one) for one in listed(prompt)], sampling_params, values)

    def _stream(
        self, prompts: Sequence[ReadPrompt], sampling_params: Params | None, values: Mapping[str, Any]
    ) -> Generator[StreamPiece, None, None]:
        if len(prompts) != 1:
            raise InvalidRequestError(f"the prompt is {len(prompts)} prompts; allowed in a stream: 1")
        (answer,) = self._answers(prompts, sampling_params, values, pieces=True)
        if len(answer.streams) > 1:
            raise InvalidRequestError(f"n is {len(answer.streams)}; allowed in a stream: 1")
        return self._pieces(answer)

    def _pieces(self, answer: Answer) -> Generator[StreamPiece, None, None]:
        (stream,) = answer.streams
        with contextlib.closing(self._driver.turns([answer], streaming=True)) as turns:
            for _ in turns:
                yield stream.take_piece()

    @cached_property
    def _images(self) -> PromptImages:
        """Begun with the first prompt that is a text, or has images. Raises ConfigError."""
        return PromptImages(self._model_dir, self.engine.model, self.config, lambda: self.tokenizer)

    @cached_property
    def _chats(self) -> PromptBorders:
        return PromptBorders(self.tokenizer, asks=self.engine.model.has_states)

    def _render(
        self,
        messages: Sequence[Message],
        template_arguments: Mapping[str, Any] | None,
        options: Mapping[str, Any] | None,
    ) -> ReadPrompt:
        arguments = dict(template_arguments or {})
        seen = self._images.of_chat(messages, arguments, options)
        return seen or self._chats.read(messages, arguments)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Iterable[Params] | None = None,
        *,
        progress: bool = False,
        **values: Any,
    ) -> list[RequestOutput]:
        """Continues each prompt: a text, or token ids as a list or a one-dimensional array or tensor; answers are in
        the prompts' order. Either may be in a mapping, as in vLLM: {"prompt": ...}, {"prompt_token_ids": ...}, beside
        {"multi_modal_data": {"image": one or a list}}, whose places are in the prompt.

        `sampling_params`: one for all, or one for each prompt, each also as a mapping of its fields; without them the
        model's defaults, changed by `values` (max_tokens=..., temperature=...). `lora_request`: as in vLLM, or names of
        adapters. Raises InvalidRequestError for a
        request that cannot be served, and EngineDeadError if the engine fails; no request is left running then.
        """
        return self._run([self._read(one) for one in listed(prompts)], sampling_params, values, progress)

    def _run(
        self,
        prompts: Sequence[ReadPrompt],
        sampling_params: Params | Iterable[Params] | None,
        values: Mapping[str, Any],
        progress: bool,
    ) -> list[RequestOutput]:
        answers = self._answers(prompts, sampling_params, values)
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Progress(*columns, console=Console(stderr=True), disable=not progress)
        task = bar.add_task("", total=sum(len(answer.streams) for answer in answers))
        with bar, contextlib.closing(self._driver.turns(answers)) as turns:
            for ended in turns:
                if ended:
                    bar.update(task, advance=ended)
        return [answer.output() for answer in answers]

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        dimensions: int | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """The embedding of each prompt, in their order; prompts are those of `generate`.

        `dimensions`: keeps only the first ones (Matryoshka). `pooling`: last, mean or cls; `normalize`: to length 1.
        Defaults are those of the checkpoint's sentence-transformers files, otherwise the last token's hidden state,
        normalized.
        Raises InvalidRequestError, EngineDeadError.
        """
        self._check_embeddings()
        params = scoring.embedding_params(
            self.engine.model, dimensions=dimensions, normalize=normalize, pooling=pooling
        )
        return self._pooled([self._token_ids(prompt) for prompt in listed(prompts)], params)

    def score(self, query: str, documents: str | Iterable[str], *, instruction: str | None = None) -> list[float]:
        """How well each document answers the query; text/scoring.py describes the methods. `instruction`: the task, for
        models that judge by yes and no. Raises InvalidRequestError, EngineDeadError."""
        self._check_embeddings()
        texts, model = [documents] if isinstance(documents, str) else list(documents), self.engine.model
        if not texts:
            return []
        prompts, params = scoring.pair_prompts(model, self.tokenizer, [query], texts, instruction)
        vectors = [output.embedding for output in self._pooled(prompts, params)]
        found = scoring.scores(scoring.scoring_of(model), vectors, 1, raw=model.scores.raw)
        return found.tolist()  # type: ignore[no-any-return]

    def _pooled(self, prompts: Sequence[list[int]], params: PoolingParams) -> list[EmbeddingOutput]:
        welcome = self.engine.welcome
        for ids in prompts:
            check_prompt("the prompt", ids, vocab_size=welcome.vocab_size, max_seq_len=welcome.max_seq_len)
        answers = [PooledAnswer(self._new_uid(1), ids, params) for ids in prompts]
        with contextlib.closing(self._driver.turns(answers)) as turns:
            for _ in turns:
                pass
        for answer in answers:
            if answer.error:
                raise EngineDeadError(answer.error)
        return [answer.output() for answer in answers]

    def _check_embeddings(self) -> None:
        if not self.config.enable_embeddings:
            raise InvalidRequestError("enable_embeddings is false; allowed with it: no embeddings and scores")

    def _token_ids(self, prompt: GivenPrompt) -> list[int]:
        if isinstance(prompt, PromptWithImages):
            raise InvalidRequestError("multi_modal_data is given; allowed in embed: texts and token ids")
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _read(self, prompt: GivenPrompt) -> ReadPrompt:
        if isinstance(prompt, PromptWithImages):
            return self._images.of_prompt(prompt.prompt, prompt.images, prompt.options, prompt.uuids)
        return self._token_ids(prompt)

    def _answers(
        self,
        prompts: Sequence[ReadPrompt],
        sampling_params: Params | Iterable[Params] | None,
        values: Mapping[str, Any],
        *,
        pieces: bool = False,
    ) -> list[Answer]:
        """Validated answers that have not begun. `pieces`: their texts are read as they grow."""
        values = dict(values)
        asked = adapter_names(values.pop("lora_request", None), len(prompts))
        for name, folder in asked:  # as vLLM loads what is named with a path
            if name is not None and folder and self.engine.core.adapter_folders.get(name) != os.path.realpath(folder):
                self.load_adapter(name, folder)
        if sampling_params is not None and values:
            raise InvalidRequestError(
                f"{min(values)} is given together with sampling_params; allowed: one or the other"
            )
        if not self.engine.model.generates:
            raise InvalidRequestError(f"the model is a {self.engine.model.architecture}; allowed: embed and score")
        if sampling_params is None:
            sampling_params = self.sampling_params(**values)
        if isinstance(sampling_params, (SamplingParams, Mapping)):
            every = [self._params(sampling_params)] * len(prompts)
        elif isinstance(sampling_params, Iterable) and not isinstance(sampling_params, str):
            every = [self._params(one) for one in sampling_params]
        else:
            _refuse_params(sampling_params)
        if len(every) != len(prompts):
            raise InvalidRequestError(
                f"sampling_params has {len(every)} entries; allowed: one, or one for each of the {len(prompts)} prompts"
            )
        welcome = self.engine.welcome
        answers = []
        for prompt, params, (name, _) in zip(prompts, every, asked, strict=True):
            ids = prompt if isinstance(prompt, list) else prompt.token_ids
            params = self._translate(params if name is None else msgspec.structs.replace(params, lora_name=name))
            params.validate(welcome.vocab_size)
            check_prompt("the prompt", ids, vocab_size=welcome.vocab_size, max_seq_len=welcome.max_seq_len)
            params = self._bound_thoughts(params, ids)
            images = None
            if isinstance(prompt, SeenIds):
                params, images = self._images.of_answer(prompt, params)
            parts = prompt.parts if isinstance(prompt, ChatIds) else NO_PARTS
            answers.append(Answer(self._new_uid(params.n), ids, params, self._vocabulary, pieces, images, parts))
        return answers

    def _params(self, given: Params) -> SamplingParams:
        if isinstance(given, SamplingParams):
            return given
        return self.sampling_params(**given) if isinstance(given, Mapping) else _refuse_params(given)

    def _translate(self, params: SamplingParams) -> SamplingParams:
        """Converts bad words, and stop strings that are special tokens, to token ids.

        Raises InvalidRequestError for stop strings if tokens have no text.
        """
        if params.stop and not len(self._vocabulary):
            raise InvalidRequestError(f"stop is {params.stop!r}; allowed: none, as this model has no tokenizer")
        special = self._vocabulary.special_tokens
        ends = tuple(special[text] for text in params.stop if text in special)
        if ends:  # their text is not part of an answer, so it would never be found there
            params = msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
        if not params.bad_words:
            return params
        params.validate()  # before a tokenizer works on them
        words = (*params.bad_words_token_ids, *self.tokenizer.encode_words(params.bad_words))
        return msgspec.structs.replace(params, bad_words_token_ids=tuple(dict.fromkeys(words)))

    def _bound_thoughts(self, params: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
        """Adds the tags of a limited reasoning, unless the caller has given them."""
        budget = params.thinking_token_budget
        if budget is None or params.thinking_tags is not None:
            return params
        if not len(self._vocabulary):
            raise InvalidRequestError(f"thinking_token_budget is {budget}; allowed: none, as there is no tokenizer")
        tokenizer = self.tokenizer
        tags = thinking_tags(
            "auto",
            budget,
            tokenizer.chat_template,
            tokenizer.added_tokens,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            tokenizer.decode([int(token) for token in prompt[-TAIL:]]),
        )
        return msgspec.structs.replace(params, thinking_tags=tags)

    def _new_uid(self, count: int) -> int:
        with self._uid_lock:
            uid = self._next_uid
            self._next_uid += count
        return uid


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
