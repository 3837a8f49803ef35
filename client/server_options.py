"""Options that several commands have, as values: where the server is, and how to continue a prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from minisgl_backend.host.options.commands import declared_options, with_options

from .chat.conversation import OpenStream
from .client import Client
from .console import progress
from .errors import Unavailable
from .openai_client import OpenAIClient
from .request import SamplingOptions

Model = Annotated[str, typer.Option(help="Name of the model on the server.")]
System = Annotated[str | None, typer.Option(help="System prompt.")]
OpenAIUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="OpenAI's API instead: HOST:PORT, or https://HOST/PATH.")
]
ApiKey = Annotated[str | None, typer.Option(help="With --openai.", show_envvar=True, envvar="OPENAI_API_KEY")]
ModelOfEither = Annotated[
    str | None, typer.Option(help="Name of the model; default: ensemble, with --openai the server's first.")
]


def options_of(name: str, table: type) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Decorates a command: its parameter `name` is a `table`, a dataclass whose fields are options."""
    return with_options(name, declared_options(table), lambda values: table(**values))


@dataclass(frozen=True)
class ServerAddress:
    """Triton's server."""

    url: Annotated[
        str | None,
        typer.Option(
            help="Default: MINISGL_URL, else 127.0.0.1:8001, with --protocol http port 8000; a scheme may be before it."
        ),
    ] = None
    protocol: Annotated[str | None, typer.Option("--protocol", help="grpc (default) or http.")] = None

    def connect(
        self, model: str = "ensemble", *, timeout: float | None = None, metrics_url: str | None = None
    ) -> Client:
        wire: Any = self.protocol  # parse_url says what is allowed
        return Client(self.url, wire, model, timeout=timeout, metrics_url=metrics_url)


@dataclass(frozen=True)
class ServerOptions(ServerAddress):
    """The same, for requests that may take long."""

    timeout: Annotated[float | None, typer.Option(help="Seconds for a whole answer; default: no limit.")] = None

    def connect(self, model: str = "ensemble", **settings: Any) -> Client:
        return super().connect(model, timeout=self.timeout, **settings)


@dataclass(frozen=True)
class SamplingFlags:
    """How to continue the prompt; None: the model's own default."""

    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")] = None
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None
    top_p: Annotated[float | None, typer.Option()] = None
    min_p: Annotated[float | None, typer.Option()] = None
    seed: Annotated[int | None, typer.Option()] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None

    def given(self, max_tokens: int | None) -> SamplingOptions:
        values = {"max_tokens": max_tokens, **asdict(self), "stop": self.stop or None}
        options: Any = {name: value for name, value in values.items() if value is not None}
        return options  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ChatSource(ServerOptions):
    """Who answers a chat."""

    openai: OpenAIUrl = None
    api_key: ApiKey = None
    local: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model in this process instead: a folder, a hub id or demo.")
    ] = None
    model: ModelOfEither = None

    @contextlib.contextmanager
    def open(self, options: SamplingOptions) -> Iterator[OpenStream]:
        """The client's streams. Raises ValueError, ClientError and CommandError."""
        given = {"--openai": self.openai, "--local": self.local, "--url": self.url, "--protocol": self.protocol}
        named = [option for option, value in given.items() if value is not None]
        if len(named) > 1 and (self.openai is not None or self.local is not None):
            raise ValueError(f"{' and '.join(named)} are given; allowed: one server or model")
        if self.local is not None:
            from .in_process import InProcessClient

            if self.model is not None or self.timeout is not None:
                raise ValueError("--local goes with neither --model nor --timeout")
            with progress(f"loading {self.local}"):
                engine = InProcessClient(self.local)
            with engine:
                yield lambda messages: engine.stream(messages=messages, **options)
        elif self.openai is not None:
            with OpenAIClient(self.openai, self.model, api_key=self.api_key, timeout=self.timeout) as server:
                yield lambda messages: server.stream(messages=messages, **options)
        else:
            with self.connect(self.model or "ensemble") as client:
                if not client.is_live():
                    raise Unavailable(f"cannot connect to {self.url or 'the server'}")
                measured: SamplingOptions = {**options, "return_perf_metrics": True}  # for the cached tokens
                yield lambda messages: client.stream(messages=messages, **measured)
