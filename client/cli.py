"""The command `minisgl`: generate, chat, bench, status, openai, and those of `local`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer
from rich.markup import escape

import minisgl_backend
from minisgl_backend.parsers.table import REASONING_PARSERS, TOOL_PARSERS

from .bench.command import bench_app
from .chat.command import ChatLoop
from .chat.conversation import Chat, OpenStream
from .client import Client
from .connection import Protocol, parse_url
from .console import errors_in_one_line, fail, print_table, progress, remark, say_error, without_controls, write_answer
from .embed_command import embed
from .errors import NO_CHAT_TEMPLATE, InvalidRequest, Unavailable
from .local import add_local_commands
from .openai_client import OpenAIClient
from .request import Message, SamplingOptions
from .results import Result
from .server_options import ApiKey, ModelOfEither, OpenAIUrl
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

Url = Annotated[
    str | None,
    typer.Option(
        help="Default: MINISGL_URL, else 127.0.0.1:8001, with --protocol http port 8000; a scheme may be before it."
    ),
]
WireProtocol = Annotated[str | None, typer.Option("--protocol", help="grpc (default) or http.")]
Model = Annotated[str, typer.Option(help="Name of the model on the server.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds for a whole answer; default: no limit.")]
System = Annotated[str | None, typer.Option(help="System prompt.")]
MaxTokens = Annotated[int | None, typer.Option(help="New tokens; default: up to the context limit.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")]
TopK = Annotated[int | None, typer.Option(help="0 is off.")]
TopP = Annotated[float | None, typer.Option()]
MinP = Annotated[float | None, typer.Option()]
Seed = Annotated[int | None, typer.Option()]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")]


GENERATE_TOKENS = 1024  # so that a small model that does not end is no matter of minutes


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from the standard input.")],
    url: Url = None,
    protocol: WireProtocol = None,
    model: Model = "ensemble",
    timeout: Timeout = None,
    system: System = None,
    max_tokens: Annotated[int | None, typer.Option(help=f"New tokens; default: {GENERATE_TOKENS}.")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    n: Annotated[int, typer.Option(help="Answers to the same prompt.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="As a message, or as a text to go on with; default: by the model's template."
        ),
    ] = None,
    stream: Annotated[bool, typer.Option(help="Print the answer as it is written.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Print the answer to one prompt: to a message where the model has a chat template, else what follows the text."""
    options = _options(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    options.setdefault("max_tokens", GENERATE_TOKENS)
    options.update({"n": n} if n != 1 else {}, **({"ignore_eos": True} if ignore_eos else {}))
    with errors_in_one_line(), _connect(url, protocol, model, timeout) as client:
        if system is not None and chat is False:
            raise ValueError("--system is given with --raw; allowed: one of them")
        question = sys.stdin.read() if prompt == "-" else prompt
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": question})
        started = time.monotonic()
        ask = _streamed if stream and n == 1 and not as_json else partial(_whole, as_json=as_json)
        try:
            if chat is False:
                result = ask(client, question, None, {**options, "apply_chat_template": False})
            else:
                result = ask(client, None, messages, options)
        except InvalidRequest as error:
            if chat is not None or system is not None or NO_CHAT_TEMPLATE not in error.message:
                raise
            remark(f"{NO_CHAT_TEMPLATE}: what follows the text is printed (--raw)")
            result = ask(client, question, None, {**options, "apply_chat_template": False})
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
def chat(
    url: Url = None,
    protocol: WireProtocol = None,
    openai: OpenAIUrl = None,
    api_key: ApiKey = None,
    local: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model in this process instead: a folder, a hub id or demo.")
    ] = None,
    model: ModelOfEither = None,
    timeout: Timeout = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    markdown: Annotated[
        bool | None, typer.Option(help="Render answers; default: on a terminal, and not in a pipe.")
    ] = None,
) -> None:
    """Talk to a model; it remembers the conversation. Triton's ensemble, or what --openai or --local names."""
    options = _options(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    with errors_in_one_line():
        given = {"--openai": openai, "--local": local, "--url": url, "--protocol": protocol}
        named = [option for option, value in given.items() if value is not None]
        if len(named) > 1 and (openai is not None or local is not None):
            raise ValueError(f"{' and '.join(named)} are given; allowed: one server or model")
        with _open_source(url, protocol, openai, api_key, local, model, timeout, options) as open_stream:
            shown = sys.stdout.isatty() if markdown is None else markdown
            is_answered = ChatLoop(Chat(open_stream, system), shown).run()
    # People have seen the error and gone on; a script needs the status.
    if not is_answered and not sys.stdin.isatty():
        raise typer.Exit(1)


@app.command()
def status(
    url: Url = None,
    protocol: WireProtocol = None,
    model: Model = "ensemble",
    metrics_url: Annotated[
        str | None, typer.Option(help="Default: MINISGL_METRICS_URL, else http://HOST:8002/metrics.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All figures as a table.")] = False,
) -> None:
    """Whether the server and the model are ready, and how they fare. Exit status 1: not ready."""
    with errors_in_one_line(), _connect(url, protocol, model, None, metrics_url) as client:
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


def _connect(
    url: str | None, protocol: str | None, model: str, timeout: float | None, metrics_url: str | None = None
) -> Client:
    chosen: Any = protocol  # parse_url says what is allowed
    wire: Protocol | None = chosen
    return Client(url, wire, model, timeout=timeout, metrics_url=metrics_url)


@app.command()
def openai(
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
    port: Annotated[int, typer.Option(min=1, max=65535)] = 9000,
    workers: Annotated[int, typer.Option(min=1, help="Processes, for many streams at once.")] = 1,
    served_model_name: Annotated[list[str] | None, typer.Option(help="What clients call the model.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="A key that clients need; also MINISGL_API_KEY.")] = None,
    tenants: Annotated[str, typer.Option(help="Whose request it is: none, key (by API key), user.")] = "none",
    tool_call_parser: Annotated[str, typer.Option(help=f"{', '.join(TOOL_PARSERS)}.")] = "auto",
    reasoning_parser: Annotated[str, typer.Option(help=f"{', '.join(REASONING_PARSERS)}.")] = "auto",
    otlp_endpoint: Annotated[str, typer.Option(help="URL of an OpenTelemetry collector for spans.")] = "",
    ssl_certfile: Annotated[str, typer.Option(help="Serve https with this certificate.")] = "",
    ssl_keyfile: Annotated[str, typer.Option(help="And its key.")] = "",
    allowed_origins: Annotated[list[str] | None, typer.Option(help="Whose pages browsers let in (CORS).")] = None,
    allowed_hosts: Annotated[list[str] | None, typer.Option(help="Names in Host, as a proxy passes them on.")] = None,
    ignore_unknown_fields: Annotated[bool, typer.Option(help="Of requests, instead of refusing them by name.")] = False,
    files_dir: Annotated[str | None, typer.Option(help="Where files and batches are kept.")] = None,
    max_files_bytes: Annotated[int, typer.Option(min=0, help="Of all of them; 0: no files, no batches.")] = 4 << 30,
    max_batch_requests: Annotated[int, typer.Option(min=1, help="Requests of batches at a time.")] = 16,
    response_store_bytes: Annotated[int, typer.Option(min=0, help="Of responses that are kept; 0: none.")] = 256 << 20,
) -> None:
    """Serve OpenAI's API before a server that runs elsewhere; scripts/serve.sh has it built in."""
    from minisgl_backend.errors import ConfigError
    from minisgl_backend.host.openai_endpoint import serve_until_signal
    from minisgl_backend.host.options.endpoint import EndpointSettings, api_keys_of, files_folder_of

    with errors_in_one_line():
        server = parse_url(url, "grpc")
        try:
            settings = EndpointSettings(
                host=host.removeprefix("[").removesuffix("]"),
                port=port,
                grpc_address=server.authority,
                grpc_secure=server.secure,
                metrics_address=metrics or replace(server, port=8002).authority,
                workers=workers,
                served_model_names=tuple(served_model_name or ()),
                api_keys=api_keys_of(api_key),
                tenants=tenants,
                tool_call_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
                otlp_endpoint=otlp_endpoint,
                ssl_certfile=ssl_certfile,
                ssl_keyfile=ssl_keyfile,
                allowed_origins=tuple(allowed_origins or ()),
                allowed_hosts=tuple(allowed_hosts or ()),
                ignore_unknown_fields=ignore_unknown_fields,
                response_store_bytes=response_store_bytes,
                files_folder=files_folder_of(files_dir or "", port, max_files_bytes),
                max_files_bytes=max_files_bytes,
                max_batch_requests=max_batch_requests,
            )
            serve_until_signal(settings, lambda text: typer.echo(text, err=True))
        except ConfigError as error:
            fail(str(error).replace("--openai-", "--"), 2)


@contextlib.contextmanager
def _open_source(
    url: str | None,
    protocol: str | None,
    openai: str | None,
    api_key: str | None,
    local: str | None,
    model: str | None,
    timeout: float | None,
    options: SamplingOptions,
) -> Iterator[OpenStream]:
    """The client that answers a chat. Raises ValueError, ClientError and CommandError."""
    if local is not None:
        from .in_process import InProcessClient

        if model is not None or timeout is not None:
            raise ValueError("--local goes with neither --model nor --timeout")
        with progress(f"loading {local}"):
            engine = InProcessClient(local)
        with engine:
            yield lambda messages: engine.stream(messages=messages, **options)
    elif openai is not None:
        with OpenAIClient(openai, model, api_key=api_key, timeout=timeout) as server:
            yield lambda messages: server.stream(messages=messages, **options)
    else:
        with _connect(url, protocol, model or "ensemble", timeout) as client:
            if not client.is_live():
                raise Unavailable(f"cannot connect to {url or 'the server'}")
            measured: SamplingOptions = {**options, "return_perf_metrics": True}  # for the cached tokens
            yield lambda messages: client.stream(messages=messages, **measured)


def _options(
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingOptions:
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or None,
    }
    options: Any = {name: value for name, value in given.items() if value is not None}
    return options  # type: ignore[no-any-return]


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
