"""The command line of `minisgl serve` and `scripts/serve.sh`, checked before anything is started.

Standard library only, so that it can be checked before anything is installed, too. Run as a program it serves the
script on a fresh clone: prints `--help` and `--version`, or what is wrong, in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minisgl_backend
from minisgl_backend.config import read_adapters
from minisgl_backend.environment import ADMIN_KEY, Environment, admin_key
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.addresses import is_loopback, reached_at
from minisgl_backend.host.options.arguments import (
    INFER_HELP,
    add_engine_options,
    add_options,
    given_parameters,
    tcp_port,
    tcp_port_or_none,
    values_of,
)
from minisgl_backend.host.options.endpoint import ENDPOINT_OPTIONS, EndpointSettings, endpoint_of
from minisgl_backend.host.options.parser import OptionParser, YamlMissing, set_defaults_from_file
from minisgl_backend.host.repository import DEMO_MODEL, DEMO_VL_MODEL
from minisgl_backend.host.triton_server import ascii_links, check_ascii
from minisgl_backend.installation import model_repository
from minisgl_backend.models.fetchable import NotFetched
from minisgl_backend.option_table import Argument, option, options_of
from minisgl_backend.process.node_options import fill_in, read_secret

_REPOSITORY = model_repository().resolve()

ANSWERED = 3  # exit code of this module as a program: help or the version was printed, and that is all

# tritonserver's interfaces that change the server or its memory. Requests, and information about models, metrics and
# health, stay open to all who reach the ports.
ADMIN_APIS = ("model-repository", "shared-memory", "logging", "trace")


def _which_port(text: str) -> int:
    raise argparse.ArgumentTypeError("there are several: --openai-port, --http-port, --grpc-port, --metrics-port")


def _seconds(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: whole seconds, 0 or more")
    return int(text)


def _admin_key(text: str) -> str:
    if not (text.isascii() and text.isprintable() and text.strip() and " " not in text):
        raise argparse.ArgumentTypeError("given; allowed: printable characters of ASCII, without spaces")
    return text


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 0 or more")
    return int(text)


def _apis(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in ADMIN_APIS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}; allowed: {', '.join(ADMIN_APIS)}, with commas between them")
    return names


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server's start. Ports are TCP ports; timeouts are in seconds."""

    repository: Path = option(  # noqa: RUF009 - a path never changes
        _REPOSITORY, "the model repository", argument=Argument(reads=lambda text: Path(text).resolve())
    )
    host: str = option(
        "127.0.0.1",
        "address to listen on; 0.0.0.0, ::: all",
        argument=Argument(reads=lambda text: text.removeprefix("[").removesuffix("]")),
    )
    http_port: int = option(8000, "", argument=Argument(metavar="PORT", reads=tcp_port))
    grpc_port: int = option(8001, "", argument=Argument(metavar="PORT", reads=tcp_port))
    metrics_port: int = option(8002, "", argument=Argument(metavar="PORT", reads=tcp_port))
    health_port: int = option(  # 0: no health endpoint
        8003,
        "GET /health/ready tells the truth; 0: no such endpoint",
        argument=Argument(metavar="PORT", reads=tcp_port_or_none),
    )
    allowed_apis: tuple[str, ...] = option(  # of ADMIN_APIS
        (),
        f"open these interfaces of tritonserver to all who reach its ports: {', '.join(ADMIN_APIS)}",
        argument=Argument(flag="--allow", metavar="API,...", reads=_apis, default="none"),
    )
    node_rank: int | None = option(  # with several nodes; above 0: this machine runs ranks but serves no clients
        None,
        "which of --nodes this is: 0 serves",
        argument=Argument(metavar="N", reads=_number, default="as torchrun, srun or a LeaderWorkerSet says"),
    )
    start_timeout: int = option(  # until the first start must have succeeded
        3600,
        "end if the model is not ready by then, downloads included; 0: wait for ever",
        argument=Argument(metavar="SECONDS", reads=_seconds),
    )
    exit_timeout: int = option(
        30, "for requests in flight at the end", argument=Argument(metavar="SECONDS", reads=_seconds)
    )
    admin_key: str | None = option(
        None,
        "who knows it may load and unload adapters below --adapter-dir; also MINISGL_ADMIN_KEY; unset: nobody, and "
        "there are neither routes nor a model for it",
        secret=True,
        argument=Argument(metavar="KEY", reads=_admin_key, default="none"),
    )
    infer: bool = option(False, INFER_HELP, argument=Argument())  # adds the model `infer`
    verbose: bool = option(False, "tritonserver's whole log", argument=Argument())
    quiet: bool = False  # warnings and errors alone: LOG_LEVEL
    arguments: tuple[str, ...] = ()  # further arguments for tritonserver itself

    @property
    def address(self) -> str:
        """HOST:PORT of the HTTP endpoint from this machine."""
        return self.address_of(self.http_port)

    def address_of(self, port: int) -> str:
        """HOST:PORT of one of the server's ports from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


SERVER_OPTIONS = options_of(ServerSettings)


_RED = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAAA1BMVEX/AAAZ4gk3AAAAD0lEQVR42mNgGAWjgHwAAAJAAAHg"
    "TR1EAAAAAElFTkSuQmCC"
)
_SEEN = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_RED}"}},
    {"type": "text", "text": "What colour is the image?"},
]


@dataclass(frozen=True)
class Arguments:
    """The validated command line."""

    server: ServerSettings
    endpoint: EndpointSettings | None  # None: no OpenAI-compatible endpoint
    engine_parameters: dict[str, str]  # engine options that were given; empty: the repository unchanged

    def example_command(self, *, has_chat_template: bool) -> str:
        """To try the server with: a question where the model answers some, else a text that it goes on with."""
        model = self.engine_parameters.get("model", DEMO_MODEL)
        text = {DEMO_MODEL: "What is 17 + 25?", DEMO_VL_MODEL: "What can you do?"}.get(
            model, "The capital of France is"
        )
        content: Any = _SEEN if model == DEMO_VL_MODEL else "Who are you?"
        body: dict[str, Any] = {"max_tokens": 32}
        if self.endpoint is not None and has_chat_template and model != DEMO_MODEL:
            body["messages"] = [{"role": "user", "content": content}]
            head = ' -H "Authorization: Bearer $MINISGL_API_KEY"' if self.endpoint.api_keys else ""
            url, rest = f"{self.endpoint.url}/v1/chat/completions", f" -H 'Content-Type: application/json'{head}"
        else:
            body["text_input"] = text
            url, rest = f"{self.server.address}/v2/models/ensemble/generate", ""
        return f"curl -s {url}{rest} -d '{json.dumps(body, separators=(',', ':'))}'"

    @property
    def ports(self) -> list[tuple[str, int]]:
        """(option, TCP port) of everything that will listen."""
        names = ("http_port", "grpc_port", "metrics_port", "health_port")
        ports = [(SERVER_OPTIONS[name].label, getattr(self.server, name)) for name in names]
        ports = [(flag, port) for flag, port in ports if port]
        if self.endpoint is not None:
            ports.append(("--openai-port", self.endpoint.port))
        return ports


def parse_arguments(arguments: Sequence[str], program: str = "scripts/serve.sh") -> Arguments:
    """Raises ConfigError for a wrong engine option; exits with a message (SystemExit) for any other mistake.

    `program`: its name in the help.
    """
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    parser = server_parser(program)
    values = fill_in(_values_of(parser, arguments[:split]), os.environ)
    values["admin_key"] = values["admin_key"] or _key_of_environment()
    settings = ServerSettings(
        **values_of(SERVER_OPTIONS, values),
        quiet=Environment.read().log_level in ("WARNING", "ERROR"),
        arguments=tuple(arguments[split + 1 :]),
    )
    parameters = given_parameters(parser, values)
    check_ascii("the package", Path(minisgl_backend.__file__).resolve().parent)
    check_ascii("the model repository", settings.repository)
    if not parameters.get("model", "").isascii():
        from minisgl_backend.weights.gguf_index import name_of  # options are also read before anything is installed

        model = Path(parameters["model"])
        values["served_model_name"] = values["served_model_name"] or [name_of(model)]
        parameters["model"] = str(ascii_links(model))
    if adapters := read_adapters(parameters.get("adapters", "")):
        _check_adapters(adapters, values["served_model_name"] or [Path(parameters.get("model", "")).name])
    endpoint = None
    if values["openai_port"]:
        endpoint = endpoint_of(
            values,
            host=settings.host,
            grpc_address=settings.address_of(settings.grpc_port),
            metrics_address=settings.address_of(settings.metrics_port),
            takes_commands=bool(settings.admin_key),
        )
        if settings.admin_key in endpoint.api_keys:
            raise ConfigError("--admin-key is one of --api-key; allowed: a key of its own")
        if endpoint.media_domains:
            parameters.setdefault("media_domains", ",".join(endpoint.media_domains))
    if parameters.get("nodes", "1") != "1":
        read_secret(os.environ)
    return Arguments(settings, endpoint, parameters)


def _key_of_environment() -> str | None:
    """The admin key there; None: there is none. Raises ConfigError."""
    try:
        return _admin_key(admin_key()) if admin_key() else None
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{ADMIN_KEY} is {error}") from None


def _check_adapters(adapters: Mapping[str, str], names: Sequence[str]) -> None:
    """Raises ConfigError where an adapter could not be asked for."""
    if both := sorted(adapters.keys() & set(names)):
        raise ConfigError(f"adapters names {both[0]!r}, which is the model's own name; allowed: other names")


def open_ports_warning(arguments: Arguments) -> str | None:
    """Which ports answer without a key although others reach them; None if there is nothing to warn of."""
    server, endpoint = arguments.server, arguments.endpoint
    ports = {"HTTP": server.http_port, "gRPC": server.grpc_port, "metrics": server.metrics_port}
    ports["health"] = server.health_port
    has_key = endpoint is not None and bool(endpoint.api_keys)
    if endpoint is not None and not has_key:
        ports["OpenAI's and Anthropic's APIs"] = endpoint.port
    if is_loopback(server.host) and not has_key:
        return None
    who = (
        "everybody on this machine"
        if is_loopback(server.host)
        else f"all who reach {', '.join(reached_at(server.host))}"
    )
    named = ", ".join(f"{port} ({what})" for what, port in ports.items() if port)
    key = f"the API key guards port {endpoint.port} alone" if endpoint is not None and has_key else "no API key is set"
    return f"{key}: ports {named} answer {who} (docs/operations.md, Security)"


def _values_of(parser: OptionParser, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of the command line, and for options not given there, of the --config file."""
    values = vars(parser.parse_args(arguments))
    if values["config"] is not None:
        in_file = set_defaults_from_file(parser, Path(values["config"]))
        if "model" in in_file and values["model_argument"] is not None and values["model"] is None:
            parser.set_defaults(model=None)
        values = vars(parser.parse_args(arguments))
    return values


def say(text: str) -> None:
    """Prints one line for the person who runs the server."""
    with contextlib.suppress(OSError, ValueError):  # a closed terminal does not stop the server
        bold, plain = ("\033[1m", "\033[0m") if sys.stderr.isatty() else ("", "")
        print(f"{bold}[serve]{plain} {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 the arguments are right, 2 they are wrong, ANSWERED there is nothing more to do."""
    try:
        parse_arguments(sys.argv[1:] if arguments is None else arguments)
    except (YamlMissing, NotFetched):  # read again once everything is installed, `minisgl fetch` too
        return 0
    except ConfigError as error:
        say(f"error: {error}")
        return 2
    except SystemExit as end:
        return int(end.code or ANSWERED)
    return 0


def server_parser(program: str) -> OptionParser:
    """The whole command line; engine options are in a group of their own."""
    parser = OptionParser(
        prog=program,
        usage="%(prog)s [MODEL] [OPTION ...] [-- TRITONSERVER_OPTION ...]",
        description="Serve a model on Triton Inference Server until Ctrl-C; without options, the demo model.",
        epilog="Arguments after -- go to tritonserver itself.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"minisgl-backend {minisgl_backend.__version__}")
    parser.add_argument("--config", metavar="FILE", help="YAML with options by name; those given here come before it")
    parser.add_argument("--port", type=_which_port, help=argparse.SUPPRESS)
    add_options(parser, SERVER_OPTIONS)
    add_options(parser.add_argument_group("OpenAI-compatible endpoint", "docs/openai.md"), ENDPOINT_OPTIONS)
    add_engine_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
