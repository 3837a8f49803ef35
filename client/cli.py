"""The command `minisgl`: generate, chat, bench, status, openai, and those of `local`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

import minisgl_backend
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.commands import table_options, with_options
from minisgl_backend.host.options.endpoint import ENDPOINT_OPTIONS, endpoint_of

from .bench.command import bench_app
from .chat.command import ChatLoop
from .chat.conversation import Chat
from .client import Client
from .connection import parse_url
from .console import errors_in_one_line, fail, print_table, remark, say_error, without_controls, write_answer
from .embed_command import embed
from .errors import NO_CHAT_TEMPLATE, InvalidRequest, Unavailable
from .local import add_local_commands
from .request import Message, SamplingOptions, question_of
from .results import Result
from .server_options import ChatSource, Model, SamplingFlags, ServerAddress, ServerOptions, System, options_of
from .status import metrics_table, status_lines

app = typer.Typer(
    help="Serve a model; talk to a running server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"minisgl-backend {minisgl_backend.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve a model; talk to a running server."""


add_local_commands(app)
app.command()(embed)

GENERATE_TOKENS = 1024  # so that a small model that does not end is no matter of minutes


@dataclass(frozen=True)
class Asked:
    """How `generate` asks and answers."""

    system: System = None
    image: Annotated[list[Path] | None, typer.Option(help="An image file before the text; may be repeated.")] = None
    max_tokens: Annotated[int | None, typer.Option(help=f"New tokens; default: {GENERATE_TOKENS}.")] = None
    n: Annotated[int, typer.Option(help="Answers to the same prompt.")] = 1
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="As a message, or as a text to go on with; default: by the model's template."
        ),
    ] = None
    stream: Annotated[bool, typer.Option(help="Print the answer as it is written.")] = True
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False


@app.command()
@options_of("server", ServerOptions)
@options_of("sampling", SamplingFlags)
@options_of("asked", Asked)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from the standard input.")],
    server: ServerOptions,
    sampling: SamplingFlags,
    asked: Asked,
    model: Model = "ensemble",
) -> None:
    """Print the answer to one prompt: to a message where the model has a chat template, else what follows the text."""
    options = sampling.given(asked.max_tokens)
    options.setdefault("max_tokens", GENERATE_TOKENS)
    options.update({"n": asked.n} if asked.n != 1 else {}, **({"ignore_eos": True} if asked.ignore_eos else {}))
    with errors_in_one_line(), server.connect(model) as client:
        if asked.system is not None and asked.chat is False:
            raise ValueError("--system is given with --raw; allowed: one of them")
        question = sys.stdin.read() if prompt == "-" else prompt
        messages: list[Message] = [] if asked.system is None else [{"role": "system", "content": asked.system}]
        messages.append(question_of(question, asked.image or ()))
        as_text: SamplingOptions = {**options, "apply_chat_template": False}
        if asked.image:  # the text has their places then
            as_text["images"] = asked.image
        started = time.monotonic()
        whole = not asked.stream or asked.n != 1 or asked.as_json
        ask = partial(_whole, as_json=asked.as_json) if whole else _streamed
        try:
            if asked.chat is False:
                result = ask(client, question, None, as_text)
            else:
                result = ask(client, None, messages, options)
        except InvalidRequest as error:
            if asked.chat is not None or asked.system is not None or NO_CHAT_TEMPLATE not in error.message:
                raise
            remark(f"{NO_CHAT_TEMPLATE}: what follows the text is printed (--raw)")
            result = ask(client, question, None, as_text)
        _print_summary(result, time.monotonic() - started)


def _streamed(client: Client, question: str | None, messages: list[Message] | None, options: SamplingOptions) -> Result:
    with client.stream(question, messages=messages, **options) as answer:
        for chunk in answer:
            write_answer(chunk.text)
        result = answer.result()
    write_answer("\n")
    return result


def _whole(
    client: Client, question: str | None, messages: list[Message] | None, options: SamplingOptions, as_json: bool
) -> Result:
    result = client.generate(question, messages=messages, **options)
    _print_result(result, as_json)
    return result


@app.command()
@options_of("source", ChatSource)
@options_of("sampling", SamplingFlags)
def chat(
    source: ChatSource,
    sampling: SamplingFlags,
    system: System = None,
    max_tokens: Annotated[int | None, typer.Option(help="New tokens; default: up to the context limit.")] = None,
    markdown: Annotated[
        bool | None, typer.Option(help="Render answers; default: on a terminal, and not in a pipe.")
    ] = None,
) -> None:
    """Talk to a model; it remembers the conversation. Triton's ensemble, or what --openai or --local names."""
    with errors_in_one_line(), source.open(sampling.given(max_tokens)) as open_stream:
        shown = sys.stdout.isatty() if markdown is None else markdown
        is_answered = ChatLoop(Chat(open_stream, system), shown).run()
    # People have seen the error and gone on; a script needs the status.
    if not is_answered and not sys.stdin.isatty():
        raise typer.Exit(1)


@app.command()
@options_of("server", ServerAddress)
def status(
    server: ServerAddress,
    model: Model = "ensemble",
    metrics_url: Annotated[
        str | None, typer.Option(help="Default: MINISGL_METRICS_URL, else http://HOST:8002/metrics.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All figures as a table.")] = False,
) -> None:
    """Whether the server and the model are ready, and how they fare. Exit status 1: not ready."""
    with errors_in_one_line(), server.connect(model, metrics_url=metrics_url) as client:
        live, ready = client.is_live(), client.is_ready()
        first = f"server: {'live' if live else 'does not answer'}; {model}: {'ready' if ready else 'not ready'}"
        if live:
            _print_metrics(client, model, first, every)
        else:
            typer.echo(first)
        if not ready:
            raise typer.Exit(1)


def main() -> None:
    """The entry point of the installed command."""
    # Answers may contain any character; a terminal that cannot show one must not end the program. Neither must
    # undecodable input, which becomes lone surrogates that the request is refused for.
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "replace"), (sys.stdin, "surrogateescape")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)
    app()


# The endpoint's options that are spelled otherwise than on the server's command line, and those that are not there.
_SPELLED = {"workers": "--workers"}
_OTHER = {option.dest: option.default for option in map(ENDPOINT_OPTIONS.__getitem__, ("port", "max_body_bytes"))}
_ENDPOINT = {name: option for name, option in ENDPOINT_OPTIONS.items() if option.dest not in _OTHER}


@app.command()
@with_options("endpoint", table_options(_ENDPOINT, flags=_SPELLED))
def openai(
    endpoint: dict[str, Any],
    url: Annotated[
        str | None,
        typer.Option(
            help="The server's gRPC: HOST:PORT, or grpcs://HOST:PORT; default: MINISGL_URL, else 127.0.0.1:8001."
        ),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Its metrics, HOST:PORT; default: port 8002 of the same host.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0, ::: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = ENDPOINT_OPTIONS["port"].default,
) -> None:
    """Serve OpenAI's API before a server that runs elsewhere; scripts/serve.sh has it built in."""
    from minisgl_backend.host.openai_endpoint import serve_until_signal

    with errors_in_one_line():
        server = parse_url(url, "grpc")
        addresses = {
            "grpc_address": server.authority,
            "metrics_address": metrics or replace(server, port=8002).authority,
        }
        addresses["host"] = host.removeprefix("[").removesuffix("]")
        try:
            values = {**_OTHER, ENDPOINT_OPTIONS["port"].dest: port, **endpoint}
            settings = endpoint_of(values, grpc_secure=server.secure, **addresses)
            serve_until_signal(settings, lambda text: typer.echo(text, err=True))
        except ConfigError as error:
            fail(str(error).replace("--openai-", "--"), 2)


def _print_result(result: Result, as_json: bool) -> None:
    if as_json:
        write_answer(json.dumps(dataclasses.asdict(result), ensure_ascii=False, indent=2) + "\n")
        return
    for choice in result.choices:
        if len(result.choices) > 1:
            write_answer(f"--- {choice.index} ({choice.finish_reason})\n")
        write_answer(f"{choice.text}\n")


def _print_summary(result: Result, seconds: float) -> None:
    if result.num_output_tokens:
        remark(
            f"{result.num_input_tokens} tokens in, {result.num_output_tokens} out, {seconds:.2f} s, "
            f"{result.num_output_tokens / seconds:.1f} tokens/s, finish reason {result.finish_reason}"
        )
    if not any(choice.text for choice in result.choices):
        typer.echo("the model ended at once, without a word; another prompt, --chat or --raw may help", err=True)


def _print_metrics(client: Client, model: str, first: str, as_table: bool) -> None:
    """The server may be ready although its metrics are off or unreachable."""
    try:
        metrics = client.metrics()
    except Unavailable as error:
        typer.echo(first)
        say_error(escape(str(error)))
        return
    if as_table:
        typer.echo(first)
        print_table(metrics_table(metrics, model))
    else:
        for line in status_lines(metrics, first, time.time()):
            typer.echo(without_controls(line))
