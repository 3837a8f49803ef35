"""A model in this process with a client's interface. Only this module loads the engine, and only when it is used."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from minisgl_backend.errors import CapacityError, ConfigError, InvalidRequestError, MinisglError

from .console import CommandError
from .errors import InvalidRequest, ServerError, Unavailable
from .request import Message, SamplingOptions
from .results import Reply
from .stream import AsyncTextStream, TextStream

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from minisgl_backend import StreamPiece

T = TypeVar("T")


class InProcessClient:
    """`minisgl_backend.LLM` with a client's streams. Used by one thread, one answer at a time.

    Raises CommandError for a model or machine that cannot be used.
    """

    def __init__(self, model: str) -> None:
        try:
            # Imported late by the package: clients of a server need no torch.
            from minisgl_backend import LLM

            self._llm = LLM(model)
            _ = self._llm.tokenizer  # loaded now rather than while the user waits for the first answer
        except ConfigError as error:
            raise CommandError(str(error)) from None

    def stream(self, *, messages: Sequence[Message], **options: Unpack[SamplingOptions]) -> TextStream:
        """The answer in pieces. Ctrl-C takes effect between two steps of the engine, never within one."""
        arguments = options.pop("chat_template_kwargs", None)
        with _translated():
            pieces = self._llm.stream_chat(messages, template_arguments=arguments, **options)
        return TextStream(AsyncTextStream(_InProcessCall(pieces), ""), _SameThread())

    def close(self) -> None:
        self._llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _SameThread:
    """A Portal to coroutines that wait for nothing: the engine steps in the thread that asks."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        raise AssertionError("the coroutine waits for something")

    def post(self, function: Callable[[], object]) -> None:
        function()


class _InProcessCall:
    """One answer of the engine."""

    def __init__(self, pieces: Generator[StreamPiece, None, None]) -> None:
        self._pieces = pieces
        self._interrupt = _Interrupt()

    async def receive(self) -> Reply | None:
        """The result of the next step, None after the last. Raises ClientError, and KeyboardInterrupt after Ctrl-C."""
        if self._interrupt.came:
            raise KeyboardInterrupt
        with _translated():
            piece = next(self._pieces, None)
        if piece is None:
            self._interrupt.release()
            return None
        if piece.finish_reason == "error":
            raise ServerError(piece.error)
        if not piece.token_ids and piece.finish_reason is None:
            return Reply({})
        outputs: dict[str, list[Any]] = {
            "text_output": [piece.text],
            "num_input_tokens": [piece.num_prompt_tokens],
            "num_output_tokens": [len(piece.token_ids)],
            "num_cached_tokens": [piece.num_cached_tokens],
        }
        if piece.finish_reason is not None:
            outputs["finish_reason"] = [piece.finish_reason]
        return Reply(outputs)

    def cancel(self) -> None:
        self._pieces.close()
        self._interrupt.release()


class _Interrupt:
    """Defers the first Ctrl-C until it is asked for: within a step it would leave the engine's state inconsistent."""

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None
        with contextlib.suppress(ValueError):  # not the main thread, the only one that receives signals
            self._before = signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:  # a second one: the step does not seem to end
            raise KeyboardInterrupt
        self.came = True

    def release(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Converts the engine's errors to those of a client."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequest(str(error)) from None
    except CapacityError as error:
        raise Unavailable(str(error)) from None
    except MinisglError as error:
        raise ServerError(str(error)) from None
